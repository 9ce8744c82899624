"""Runs made of traces that others recorded: a file of each rank becomes the batches that the rank would have sent.

    files.py               which reader reads a file
    trace_events.py        the events of a JSON file, a piece at a time
    parquet.py             the columns of a Parquet file
    kineto.py, horovod_timeline.py, nccl_inspector.py, straggler_analysis.py
                           what a format says of each rank
    kineto_json.py, kineto_events.py
                           events of torch.profiler by category, and what is kept of them
    rank_trace.py          the facts that these formats have in common
    replay.py              these facts, told to the step tracker as a training tells them
    exported.py            steps that ddpobs itself exported: nothing is replayed
    groups.py              who is compared with whom
    arrivals.py            who arrived last
    traced_run.py          the run's batches
    flight_recorder.py, dump_verdicts.py, dumped_run.py
                           dumps of a hang: which rank did not come to a collective, as a run without steps
    __main__.py            the process in which a collector reads uploaded files

A trace is replayed through the same tracker and the same sums as live telemetry, so that both mean the same.
"""
