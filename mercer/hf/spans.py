"""Write the names of many layers in few words."""

import re
from collections.abc import Iterable


def spans(names: Iterable[str]) -> str:
    """Join names that differ in one number into ranges of that number, one line for each kind of name.

    >>> spans(["layers.0.attn", "layers.1.attn", "layers.2.attn", "layers.5.attn"])
    'layers.{0-2,5}.attn'
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for name in names:
        found = re.fullmatch(r"(.*?)(\d+)(.*)", name)
        key = (name, "") if found is None else (found[1], found[3])
        groups.setdefault(key, []).extend([] if found is None else [int(found[2])])
    return "\n".join(head + ranges(numbers) + tail for (head, tail), numbers in groups.items())


def ranges(numbers: Iterable[int]) -> str:
    """Write numbers as ranges.

    >>> ranges([3, 1, 2, 7]), ranges([4])
    ('{1-3,7}', '4')
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return "{" + ",".join(words) + "}" if len(words) > 1 or "-" in "".join(words) else "".join(words)
