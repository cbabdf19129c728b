"""Where the time of a call goes, kernel by kernel."""

from collections import defaultdict
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, schedule


def profile(
    fn: Callable, inputs: tuple | list | dict = (), wait: int = 50, warmup: int = 50, rep: int = 100
) -> dict[str, float]:
    """Average milliseconds a call of ``fn`` spends in each kernel.

    Args:
        fn: any callable.
        inputs: its arguments, a tuple or list by position or a dict by keyword.
        wait: calls before the profiler is on.
        warmup: calls with the profiler on that do not count.
        rep: calls that count.

    Returns:
        Device milliseconds a call by kernel name, in the order of the first launches, and their
        sum as ``"total"``. A kernel that every call launches several times is listed as
        ``name#1``, ``name#2``, ... in launch order. Where nothing runs on a CUDA device, the
        milliseconds of CPU time by operator, without those of the operators it calls.

    Raises:
        ValueError: ``wait`` or ``warmup`` is negative, or ``rep`` not positive.
    """
    if wait < 0 or warmup < 0 or rep < 1:
        raise ValueError(f"wait, warmup and rep must be at least 0, 0 and 1, got {wait}, {warmup} and {rep}")
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)

    def settle():
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    for _ in range(wait):
        fn(*args, **kwargs)
    settle()
    with torch.profiler.profile(
        activities=activities, schedule=schedule(wait=0, warmup=warmup, active=rep, repeat=1)
    ) as profiler:
        for call in range(warmup + rep):
            fn(*args, **kwargs)
            if call in (warmup - 1, warmup + rep - 1):
                # Kernels that still run where the recording starts would be counted, where it ends lost.
                settle()
            profiler.step()

    events = [e for e in profiler.events() if not e.is_user_annotation]
    launches = [e for e in events if e.device_type == DeviceType.CUDA]
    if launches:
        launches.sort(key=lambda e: e.time_range.start)
        times = _by_launch([(e.name, e.time_range.elapsed_us()) for e in launches], rep)
    else:
        times = defaultdict(float)
        for event in events:
            times[event.name] += event.self_cpu_time_total
    times = {name: us / rep / 1e3 for name, us in times.items()}
    return {**times, "total": sum(times.values())}


def _by_launch(launches: list[tuple[str, float]], rep: int) -> dict[str, float]:
    """Sum (name, time) over ``rep`` calls, each launch of a call by itself.

    A kernel whose launches do not divide evenly among the calls is summed under its plain name.
    """
    by_name = defaultdict(list)
    for name, time in launches:
        by_name[name].append(time)
    times = {}
    for name, all_times in by_name.items():
        repeats, rest = divmod(len(all_times), rep)
        if repeats > 1 and rest == 0:
            for i in range(repeats):
                times[f"{name}#{i + 1}"] = sum(all_times[i::repeats])
        else:
            times[name] = sum(all_times)
    return times
