"""Meanings of the numbers of NVIDIA's GPU faults ("Xid").

The numbers and the kind of fault follow NVIDIA's Xid documentation
(docs.nvidia.com/deploy/xid-errors); the words are ours. A number names a symptom: one fault
often brings several, and an Xid of an application can in the end be the hardware's fault.
"""

from __future__ import annotations

from msgspec import Struct

APPLICATION = "application"
HARDWARE = "hardware"
DRIVER = "driver"
UNKNOWN = "unknown"

CATALOG = "docs.nvidia.com/deploy/xid-errors"

_DEBUG = "Run the program under compute-sanitizer to find the access or the kernel."
_RESTART = "Restart the job; if this happens again, reset the GPU."
_RESET = "Stop the jobs on the GPU and reset it; if this happens again, have the board examined."
_LATER = "The job can continue; reset the GPU when the job is done."
_REPORT = "The GPU keeps working; report the error to NVIDIA."
_UPDATE = "Reset the GPU or reboot; if this happens again, change the driver version."
_SERVICE = "Take the node out of service and have the board examined."
_LINK = "Reset the GPU; if this happens again, have the link and its slot or bridge examined."


class Xid(Struct, frozen=True):
    """One number: what happened, whose fault it usually is, what to do."""

    number: int
    meaning: str
    fault: str  # APPLICATION, HARDWARE, DRIVER or UNKNOWN
    action: str
    goes_on: bool = False  # work on the GPU can go on


_KNOWN = {
    number: Xid(number, meaning, fault, action, action in (_LATER, _REPORT))
    for number, meaning, fault, action in (
        (8, "the GPU stopped processing: a kernel ran into a timeout", APPLICATION, _RESTART),
        (13, "a kernel performed an illegal operation, usually an out-of-bounds access", APPLICATION, _DEBUG),
        (31, "a kernel or copy used an address that is not mapped", APPLICATION, _DEBUG),
        (32, "the command stream from the host was corrupted", HARDWARE, _LINK),
        (38, "the driver's firmware failed", DRIVER, _UPDATE),
        (43, "the driver terminated a program's work on the GPU after an error of that program", APPLICATION, _DEBUG),
        (44, "the compute engine failed while switching between programs", HARDWARE, _RESET),
        (45, "a program's work was removed from the GPU: it was killed, or another error came first", APPLICATION,
         "If the program was not killed on purpose, look for an earlier error."),
        (48, "the memory returned data that ECC could not correct", HARDWARE, _RESET),
        (54, "the auxiliary power of the board is not connected", HARDWARE, "Check the power cables."),
        (56, "the display engine failed", HARDWARE, _RESET),
        (57, "the memory interface could not be programmed", HARDWARE, _RESET),
        (61, "a microcontroller in the GPU stopped with a warning", HARDWARE, _RESET),
        (62, "a microcontroller in the GPU halted", HARDWARE, _RESET),
        (63, "a bad memory row or page was recorded and will be replaced at the next reset", HARDWARE, _LATER),
        (64, "a bad memory row or page could not be recorded or replaced", HARDWARE, _RESET),
        (65, "the video engine failed", HARDWARE, _RESET),
        (68, "the video decoder failed", HARDWARE, _RESTART),
        (69, "the compute engine received an unknown command", DRIVER, _RESTART),
        (74, "an NVLink failed, at this end or the other end", HARDWARE, _LINK),
        (78, "a virtual GPU could not be started", DRIVER, _UPDATE),
        (79, "the GPU fell off the PCIe bus", HARDWARE,
         "Power-cycle the node; if this happens again, have power, cooling and the PCIe slot examined."),
        (80, "corrupted data was sent to the GPU", HARDWARE, _LINK),
        (92, "single-bit memory errors are frequent; ECC corrects them", HARDWARE, _LATER),
        (93, "the board's InfoROM is being written too often", DRIVER, _REPORT),
        (94, "an uncorrectable memory error was contained: it affected only one program", HARDWARE,
         "Restart the job that died; reset the GPU when its other jobs are done."),
        (95, "an uncorrectable memory error was not contained: all programs on the GPU are affected", HARDWARE,
         _RESET),
        (109, "switching between programs took too long", DRIVER, _RESTART),
        (110, "the GPU reported a security fault", HARDWARE, _RESET),
        (119, "the GPU's system processor (GSP) did not answer the driver", DRIVER, _UPDATE),
        (120, "the GPU's system processor (GSP) failed", DRIVER, _UPDATE),
        (121, "the link between CPU and GPU (C2C) corrected errors", HARDWARE, _LATER),
        (123, "the GPU's microcontroller could not write to its flash memory", HARDWARE, _RESET),
        (136, "an NVLink could not be trained", HARDWARE, _LINK),
        (137, "an access to another GPU's memory over NVLink was not allowed", APPLICATION, _DEBUG),
        (140, "uncorrectable memory errors prevented the driver from retiring the bad rows", HARDWARE, _RESET),
        (143, "the GPU could not be initialized", HARDWARE, _SERVICE),
        *(
            (number, "an NVLink reported an error", HARDWARE, _LINK)
            for number in (144, 145, 146, 147, 148, 149, 150)
        ),
        (154, "the driver asks for a recovery action: a reset, a drain or a reboot", HARDWARE,
         "`nvidia-smi -q` shows the action under GPU Recovery Action; perform it when the job is done."),
        (156, "a part of the GPU was disabled", HARDWARE, _LATER),
        (157, "a part of the GPU could not be disabled", HARDWARE, _RESET),
        (158, "the GPU had a fatal timeout", HARDWARE, _RESET),
        (167, "PCIe had a fatal timeout", HARDWARE, _LINK),
        (169, "a microcontroller in the GPU (SEC2) halted", HARDWARE, _RESET),
        (171, "the device memory returned data that ECC could not correct", HARDWARE, _RESET),
        (172, "the on-chip memory returned data that ECC could not correct", HARDWARE, _RESET),
    )
}


def explain(number: int) -> Xid:
    """The entry of an Xid; for one that is not in the table, an entry that says so and where to look it up."""
    return _KNOWN.get(number) or Xid(number, "an error unknown to gputop", UNKNOWN,
                                     f"Look up the number in NVIDIA's Xid catalog: {CATALOG}.")
