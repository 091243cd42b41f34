"""The time of a step if something in it were different: the recorded window, replayed with a cure."""
