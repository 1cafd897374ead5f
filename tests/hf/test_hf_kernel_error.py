"""The kernel error: its value by hand, padding, packing, and the warning."""

import pytest
import torch
from test_hf_families import BIDIRECTIONAL
from tiny_models import build, left_padded, llama, tokens

import mercer
from mercer.errors import NumericalWarning
from mercer.hf.install import attached
from mercer.hf.observing import watch
from mercer.mixers import build_mixer


def quiet(model, batches, **options):
    """Compute the table, whatever it warns of."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)
        return mercer.kernel_error(model, batches, **options)


def test_softmax_has_no_error_and_constant_has_that_of_the_plain_average():
    batches = [tokens(2, 12), tokens(1, 9)]
    exact = mercer.kernel_error(mercer.attach(llama(), "softmax"), batches, window=2, sinks=1)
    assert all(row.error < 1e-10 < row.window for row in exact)
    constant = quiet(mercer.attach(llama(), "constant"), batches, window=2, sinks=1)
    for row in (*constant.layers, *constant.heads):
        assert row.error == pytest.approx(row.uniform, rel=1e-4)


def test_the_definition_by_hand():
    model, ids, found = mercer.attach(llama(), "performer", num_features=16), tokens(2, 10), {}
    table = quiet(model, [ids], window=3, sinks=1, first=2)
    watch(model, [ids], lambda name, mixer, seen: found.update({name: (mixer, seen)}))
    rows = list(table)
    assert len(rows) == 2
    for row, (mixer, seen) in zip(rows, found.values(), strict=True):
        scores = seen.q @ seen.k.repeat_interleave(2, 1).mT * mixer.scale
        i, j = torch.arange(10)[:, None], torch.arange(10)[None]
        v = seen.v.repeat_interleave(2, 1)
        exact = scores.masked_fill(j > i, -torch.inf).softmax(-1) @ v
        near = scores.masked_fill((j > i) | ((i - j >= 3) & (j >= 1)), -torch.inf).softmax(-1) @ v
        total = exact[:, :, 2:].square().sum()
        assert row.error == pytest.approx(((seen.o - exact)[:, :, 2:].square().sum() / total).item(), rel=1e-4)
        assert row.window == pytest.approx(((near - exact)[:, :, 2:].square().sum() / total).item(), rel=1e-4)


def test_padding_and_packing_do_not_count():
    model, ids = mercer.attach(llama(pad_token_id=0), "performer", num_features=16), tokens(1, 10)
    padded, mask, _ = left_padded(torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], 1), [4])
    alone = quiet(model, [ids], window=3, sinks=1)
    for batch in (
        {"input_ids": padded, "attention_mask": mask},
        {"input_ids": torch.cat([ids, ids], 1), "position_ids": torch.arange(10).repeat(1, 2)},
    ):
        for row, same in zip(quiet(model, [batch], window=3, sinks=1).heads, alone.heads, strict=True):
            for value, expected in ((row.error, same.error), (row.uniform, same.uniform), (row.window, same.window)):
                assert value == pytest.approx(expected, rel=1e-3)


def test_a_layer_without_use_is_warned_of_and_marked():
    model = mercer.attach(llama(), "random")
    words = r"further from softmax: .*2 of 2 converted layers \({0-1}\) than the window alone; "
    words += r"align them \(mercer align\), give them a window, or leave their softmax"
    with pytest.warns(NumericalWarning, match=words):
        table = mercer.kernel_error(model, [tokens(2, 12)], window=11, sinks=1)
    assert "worse than a trivial one" in str(table)
    assert "window 11+1" in str(table)


def test_bidirectional_models():
    class_name, arguments = BIDIRECTIONAL["bert"]
    model = mercer.attach(build(class_name, **arguments), "softmax")
    table = mercer.kernel_error(model, {"input_ids": tokens(2, 9), "attention_mask": torch.ones(2, 9).long()}, window=3)
    assert all(row.error < 1e-10 < row.window for row in table)
    useless = mercer.attach(build(class_name, **arguments), "performer", num_features=1)
    with pytest.warns(NumericalWarning, match=r"align them \(mercer align\) or leave their softmax"):  # and no window
        mercer.kernel_error(useless, {"input_ids": tokens(2, 9)})


def test_scale_is_the_models_own_even_if_the_mixer_has_another():
    model = mercer.attach(llama(), "particle", features="elu", num_features=16)
    scale = next(iter(attached(model)))[1].mixer.scale
    assert scale == 1.0
    ids, exact = tokens(1, 9), []
    watch(model, [ids], lambda name, mixer, seen: exact.append((seen, seen.exact())))
    seen, o = exact[0]
    softmax = build_mixer("softmax", num_heads=4, num_kv_heads=2, head_dim=8)
    torch.testing.assert_close(softmax(seen.q, seen.k, seen.v)[0], o)


def test_refusals():
    with pytest.raises(ValueError, match=r"LlamaForCausalLM carries no mixer; call mercer\.attach first"):
        mercer.kernel_error(llama(), [tokens(1, 5)])
    model = mercer.attach(llama(), "softmax")
    with pytest.raises(ValueError, match="there are no batches"):
        mercer.kernel_error(model, [])
    with pytest.raises(ValueError, match="a batch is a str; give tensors"):
        mercer.kernel_error(model, ["text"])
    with pytest.raises(ValueError, match=r"give batches longer than first \(9\)"):
        mercer.kernel_error(model, [tokens(1, 9)], first=9)
