"""What the step would take if something in it were different: the recorded window, replayed with a cure."""
