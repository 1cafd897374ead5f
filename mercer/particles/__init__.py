"""Feature distributions learned from labels: particles that align with the labels and repel one another.

Tensors in, tensors out: `kernel_alignment`, `riesz_energy`, `langevin_step`, `fit_particles`, `McKeanVlasov`.
scikit-learn transformers (extra `particles`, imported when first asked for): `ParticleFeatures`, `ImportanceFeatures`.
"""

from typing import TYPE_CHECKING, Any

from mercer.particles.convergence import Convergence, particle_convergence
from mercer.particles.energy import (
    Repulsion,
    coulomb_exponent,
    kernel_alignment,
    riesz_energy,
    riesz_energy_naive,
    riesz_repulsion,
)
from mercer.particles.langevin import ParticleFit, Record, fit_particles, langevin_step, resample_particles
from mercer.particles.mean_field import Evolution, McKeanVlasov
from mercer.particles.potentials import (
    FeaturePotential,
    FourierPotential,
    Potential,
    aligned_phase,
    fourier_potential,
)
from mercer.particles.projection import project_ball, project_box, project_l1_ball

if TYPE_CHECKING:
    from mercer.particles.estimators import ImportanceFeatures, ParticleFeatures

ESTIMATORS = ("ImportanceFeatures", "ParticleFeatures")

__all__ = [
    "Convergence",
    "Evolution",
    "FeaturePotential",
    "FourierPotential",
    "ImportanceFeatures",
    "McKeanVlasov",
    "ParticleFeatures",
    "ParticleFit",
    "Potential",
    "Record",
    "Repulsion",
    "aligned_phase",
    "coulomb_exponent",
    "fit_particles",
    "fourier_potential",
    "kernel_alignment",
    "langevin_step",
    "particle_convergence",
    "project_ball",
    "project_box",
    "project_l1_ball",
    "resample_particles",
    "riesz_energy",
    "riesz_energy_naive",
    "riesz_repulsion",
]


def __getattr__(name: str) -> Any:
    """Import the scikit-learn transformers when they are first asked for."""
    if name not in ESTIMATORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from mercer.particles import estimators
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("sklearn", "scipy"):
            raise
        raise ImportError(f"{name} needs scikit-learn: pip install 'mercer[particles]'") from error
    return getattr(estimators, name)
