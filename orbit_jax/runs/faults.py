"""Faults of the machine under a run, in a sentence: a full disk, a device out of memory."""

import contextlib

import jax


def sentence(error: BaseException | None) -> str | None:
    """What happened and what helps, where the error is one of those; the caller names the run."""
    text = str(error)
    if "No space left on device" in text or "Disk quota exceeded" in text:
        return (
            "the disk of the run folder is full: free some of it, or keep fewer checkpoints "
            "(run.keep_checkpoints)"
        )
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in text:
        return (
            f"a device has run out of memory ({text.splitlines()[0]:.160}): raise "
            "ppo.micro_batches, lower sampler.slots or the token limits, or set ppo.remat=always"
        )
    return None


def not_instead_of(error: BaseException | None) -> contextlib.AbstractContextManager:
    """Where an error is on its way, another of the disk, which may be full still, does not hide it.

    Without one it is raised.
    """
    return contextlib.suppress(OSError) if error else contextlib.nullcontext()
