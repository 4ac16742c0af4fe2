"""What a run will need before it is launched: its memory, traffic and operations, on devices of any kind."""
