"""What a run will need, before it is started: parameters, memory, communication, time."""
