"""Xid events of the driver, received on one thread for all GPUs of the node."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

from gputop.core.samples import XidEvent
from gputop.sources.nvml import status

WAIT_S = 1.0  # one wait in the driver: how long the thread may outlive stop()
BACKOFF_S = 5.0  # after an error of the wait; then twice as long each time
MAX_BACKOFF_S = 60.0
MAX_EVENTS = 16  # per GPU: a sick one can report thousands
# Returns of the wait a second: drivers were seen whose wait returns at once, without an event. Each costs about 20 µs,
# so this is 1% of a core.
MAX_RETURNS = 500

_NO_INSTANCE = (1 << 32) - 1
_NOT_ASKED = "gputop has not registered for these events"

Log = tuple[tuple[XidEvent, int | None], ...]  # an event and the GPU instance (MIG) that it came from, if it names one


class _Gpu:
    """State of one GPU. The tuples are replaced, never changed: any thread may read them."""

    def __init__(self, handle: Callable[[], Any]) -> None:
        self.handle = handle
        self.log: Log = ()
        self.reason: str | None = _NOT_ASKED
        self.address: int | None = None


class XidWatch:
    """Collects the Xids of the GPUs given to :meth:`add`, before or after :meth:`start`.

    One daemon thread waits in the driver, a second at most at a time; it is never joined.
    All methods may be called from any thread.
    """

    def __init__(self, nvml: Any, wall_clock: Callable[[], float]) -> None:
        self._nvml = nvml
        self._wall_clock = wall_clock
        self._changed = threading.Condition()
        self._gpus: dict[str, _Gpu] = {}
        self._events: Any = None
        self._reason: str | None = None  # why nothing is reported of any GPU
        self._wanted = self._running = self._stopped = False
        try:
            self._events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError as error:
            self._reason = status.reason(error.value, "nvmlEventSetCreate")

    def add(self, uuid: str, handle: Callable[[], Any]) -> None:
        """Watch another GPU. ``handle`` returns its NVML handle, or None once it is lost.

        Call it from the GPU's own thread, because it may block. Raises NVMLError if the GPU is gone.
        """
        gpu = _Gpu(handle)
        with self._changed:
            self._gpus[uuid] = gpu
        while (events := self._events) is not None:
            self._register(gpu, events)
            if events is self._events:
                break
        if self._wanted:
            self.start()

    def start(self) -> None:
        """Start the thread, unless it runs or there is no GPU to watch."""
        nvml = self._nvml
        with self._changed:
            self._wanted = True
            if self._running or self._stopped or not self._registered():
                return
            self._running = True
        try:
            status.start_nvml_thread(nvml, "xid", self._run)
        except nvml.NVMLError as error:
            self._reason = status.reason(error.value, "nvmlInit")

    def log(self, uuid: str) -> Log:
        """The last events of a GPU, oldest first; the same object until there is a new one."""
        gpu = self._gpus.get(uuid)
        return () if gpu is None else gpu.log

    def reason(self, uuid: str) -> str | None:
        """Reason why the Xids of this GPU are not known, or None."""
        gpu = self._gpus.get(uuid)
        return self._reason or (_NOT_ASKED if gpu is None else gpu.reason)

    def stop(self) -> None:
        """End the thread; returns at once."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _registered(self) -> frozenset[str]:
        """The GPUs whose Xids are reported, as far as is known."""
        return frozenset(u for u, gpu in self._gpus.items() if gpu.reason is None and gpu.handle() is not None)

    def _register(self, gpu: _Gpu, events: Any) -> None:
        nvml = self._nvml
        handle, xid = gpu.handle(), nvml.nvmlEventTypeXidCriticalError
        if handle is None:
            gpu.reason = "the GPU is lost"
            return
        call = "nvmlDeviceGetSupportedEventTypes"
        try:
            if not nvml.nvmlDeviceGetSupportedEventTypes(handle) & xid:
                gpu.reason = status.reason(status.NOT_SUPPORTED, call)
                return
            call = "nvmlDeviceRegisterEvents"
            nvml.nvmlDeviceRegisterEvents(handle, xid, events)
        except nvml.NVMLError as error:
            gpu.reason = status.reason(error.value, call)
            if error.value in status.DEVICE_GONE:
                raise
            return
        gpu.address = ctypes.cast(handle, ctypes.c_void_p).value
        gpu.reason = None

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        with self._changed:
            live = self._registered()
        while self._wait():
            # A GPU is lost and its event set unusable: the other GPUs get a new set. The old one is not freed,
            # because a GPU that opens late may just be registering in it; NVML's shutdown frees it.
            self._pause(BACKOFF_S)  # meanwhile the GPU's own thread finds out which one is lost
            with self._changed:
                before, live = live, self._registered()
            if live == before or not self._recreate_event_set(live):
                self._reason = "the driver stopped reporting these events when a GPU was lost; restart gputop"
                return

    def _wait(self) -> bool:
        """Record events until there is no GPU to watch (False) or NVML reports a lost GPU (True)."""
        wait, data = self._wait_call(), self._nvml.c_nvmlEventData_t()
        if wait is None:
            self._reason = status.reason(status.FUNCTION_NOT_FOUND, "nvmlEventSetWait")
            return False
        backoff_s = BACKOFF_S
        while True:
            with self._changed:
                if self._stopped or not self._registered():
                    self._running = False  # a GPU that is added later starts it again
                    return False
            data.gpuInstanceId = _NO_INSTANCE  # a driver older than MIG does not set it
            due_s = time.monotonic() + WAIT_S
            code = wait(self._events, ctypes.byref(data), ctypes.c_uint(int(1000 * WAIT_S)))
            if code in (status.SUCCESS, status.TIMEOUT):
                if code == status.SUCCESS:
                    self._record(data)
                self._reason, backoff_s = None, BACKOFF_S
                self._pause(1 / MAX_RETURNS if code == status.SUCCESS else due_s - time.monotonic())
                continue
            if code in status.DEVICE_GONE:
                return True
            self._reason = status.reason(code, "nvmlEventSetWait")
            if code == status.UNINITIALIZED:
                return False
            self._pause(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _recreate_event_set(self, live: frozenset[str]) -> bool:
        nvml = self._nvml
        try:
            self._events = events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return False
        for uuid in live:
            with contextlib.suppress(nvml.NVMLError):  # lost as well: its own thread finds out
                self._register(self._gpus[uuid], events)
        return True

    def _pause(self, seconds: float) -> None:
        if seconds > 0:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped, seconds)

    def _wait_call(self) -> Callable[..., int] | None:
        nvml = self._nvml
        # Drivers before R450 have the older one; it fills the first fields of the same structure.
        for name in ("nvmlEventSetWait_v2", "nvmlEventSetWait"):
            with contextlib.suppress(nvml.NVMLError):
                return nvml._nvmlGetFunctionPointer(name)
        return None

    def _record(self, data: Any) -> None:
        address = ctypes.cast(data.device, ctypes.c_void_p).value
        with self._changed:
            gpu = next((gpu for gpu in self._gpus.values() if gpu.address == address), None)
        if gpu is None or not data.eventType & self._nvml.nvmlEventTypeXidCriticalError:
            return
        instance = None if data.gpuInstanceId == _NO_INSTANCE else int(data.gpuInstanceId)
        event = XidEvent(self._wall_clock(), int(data.eventData))
        gpu.log = (*gpu.log, (event, instance))[-MAX_EVENTS:]
