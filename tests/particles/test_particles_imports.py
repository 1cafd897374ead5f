"""The tensor functions work where scikit-learn, scipy and POT are not installed."""

import subprocess
import sys

import pytest

import mercer.particles

BLOCKED = """
import sys
for name in ("sklearn", "scipy", "ot"):
    sys.modules[name] = None
import mercer.particles as p, torch
p.fit_particles(torch.randn(4, 2), p.FourierPotential(torch.randn(9, 2), torch.arange(9) % 2), num_steps=2)
p.riesz_energy(torch.randn(4, 2))
try:
    p.ParticleFeatures
except ImportError as error:
    print(error)
"""


def test_without_the_optional_dependencies():
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "ParticleFeatures needs scikit-learn: pip install 'mercer[particles]'"


def test_public_names_exist():
    for name in mercer.particles.__all__:
        assert getattr(mercer.particles, name).__doc__
    with pytest.raises(AttributeError, match=r"module 'mercer.particles' has no attribute 'Particle'"):
        mercer.particles.Particle  # noqa: B018
