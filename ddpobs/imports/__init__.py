"""Runs made of traces that others recorded: a file of each rank becomes the batches that the rank would have sent.

    trace_events.py     the events of a JSON file, a piece at a time
    kineto.py           what torch.profiler's events say of one rank
    flight_recorder.py  which rank did not come to a collective, of dumps; they have no steps, and make no run
    rank_trace.py       the facts that all formats have in common
    replay.py           these facts, told to the step tracker as a training tells them
    arrivals.py         who arrived last
    imported_run.py     the run's batches

A trace is replayed through the same tracker and the same sums as live telemetry, so that both mean the same.
"""
