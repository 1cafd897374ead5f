"""Time and memory of operators beside PyTorch's own attention.

Layout: `timing` and `memory` measure one call; `operators` lists what can be measured; `ops` measures over lengths;
`record` is what is kept; `show` prints and draws. A further kind of measurement is a module like `ops`, on the same
`timing` and `memory`.
"""

from mercer.bench.memory import peak_bytes
from mercer.bench.operators import BENCHES, DEFAULT_OPERATORS, Operator, Shape
from mercer.bench.ops import PHASES, bench_ops
from mercer.bench.record import Measurement, OpsBench, crossover
from mercer.bench.show import DEFAULT_LENGTHS, format_bench, ratio_figure, run_ops
from mercer.bench.timing import Timing, one_thread, steady_allocator, time_pair

__all__ = [
    "BENCHES",
    "DEFAULT_LENGTHS",
    "DEFAULT_OPERATORS",
    "PHASES",
    "Measurement",
    "Operator",
    "OpsBench",
    "Shape",
    "Timing",
    "bench_ops",
    "crossover",
    "format_bench",
    "one_thread",
    "peak_bytes",
    "ratio_figure",
    "run_ops",
    "steady_allocator",
    "time_pair",
]
