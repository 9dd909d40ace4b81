"""The arms with the file evicted: mincore shows no page of it before each run; in the order A, B, B, A."""

import statistics

from streamer.bench.cold import best_shape, direct_gbps, evict
from streamer.bench.link import MIB
from streamer.bench.meters import measured
from streamer.bench.subject import run_load
from streamer.bench.warm_arms import Report, Setting, pinned_transfer
from streamer.device.base import CopyKind

PROBE_NBYTES = 1024 * MIB  # of the file, to find the best way to read it plainly


def cold_arm(setting: Setting, report: Report) -> None:
    """A: our ring. B: plain O_DIRECT reads of the same file, in the shape that read a piece of it fastest."""
    path = setting.subject.mappings[0].shard.path
    evict(setting.subject.mappings)
    shape = best_shape(path, nbytes=PROBE_NBYTES)
    ours, plain = [], []
    with pinned_transfer(setting, asked="ring") as transfer:
        for arm in "ABBA":
            evict(setting.subject.mappings)
            if arm == "A":
                run = run_load(setting.device, transfer, setting.subject)
                report.add_run("cold ring", run)
                ours.append(run.gbps)
            else:
                plain.append(direct_gbps(path, shape))
                report.runs.append(
                    {
                        "arm": "cold O_DIRECT",
                        "gbps": round(plain[-1], 3),
                        "threads": shape.threads,
                        "block_mib": shape.block_nbytes // MIB,
                    }
                )
    report.metrics |= {
        "cold_gbps": statistics.mean(ours),
        "odirect_gbps": statistics.mean(plain),
        "cold_ratio": statistics.mean(ours) / statistics.mean(plain),
    }


def touch_arm(setting: Setting, report: Report) -> None:
    """A: touch, then copy. B: the driver's copy straight from the untouched mapping, faulting as it goes."""
    touched, untouched = [], []
    with pinned_transfer(setting, asked="touch") as transfer:
        for arm in "ABBA":
            evict(setting.subject.mappings)
            if arm == "A":
                run = run_load(setting.device, transfer, setting.subject)
                report.add_run("cold touch", run)
                touched.append(run.gbps)
            else:
                untouched.append(_untouched_gbps(setting))
                report.runs.append({"arm": "cold untouched", "gbps": round(untouched[-1], 3)})
    report.metrics |= {
        "cold_touch_gbps": statistics.mean(touched),
        "cold_untouched_gbps": statistics.mean(untouched),
        "touch_ratio": statistics.mean(touched) / statistics.mean(untouched),
    }


def _untouched_gbps(setting: Setting) -> float:
    """Each weight's bytes from the mapping in one driver copy, as loaders do that know nothing of pages."""
    device, plan = setting.device, setting.subject.plan
    largest = max(weight.tensor.nbytes for weight in plan.weights)
    buffer = device.allocate(largest, what="untouched copy")
    stream = device.create_stream("bench")
    try:
        with measured() as cost:
            for weight in plan.weights:
                source = setting.subject.mappings[weight.tensor.shard].address + weight.tensor.offset
                device.upload(buffer, 0, source, weight.tensor.nbytes, stream=stream, kind=CopyKind.TABLES)
                stream.sync()
    finally:
        stream.close()
        buffer.close()
    return cost.gbps(setting.subject.nbytes)
