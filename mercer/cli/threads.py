"""The option --threads."""


def check_threads(threads: int | None) -> None:
    """Refuse a number that is none."""
    if threads is not None and threads < 1:
        raise ValueError(f"threads ({threads}) must be at least 1")


def set_threads(threads: int | None) -> None:
    """Compute with as many CPU threads; None: as many as PyTorch chooses."""
    check_threads(threads)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
