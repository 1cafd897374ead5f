"""Calibration: the moments, whitening, proposals and the condition of Thm 3.2."""

import warnings

import pytest
import torch
from test_hf_families import BIDIRECTIONAL
from tiny_models import build, left_padded, llama, tokens

import mercer
from mercer.errors import NumericalWarning
from mercer.features import optimal_proposal
from mercer.hf.install import attached
from mercer.hf.observing import watch


def darkformer(**options):
    """Return a tiny Llama with DARKFormer's features, its queries and keys of moderate size."""
    model = llama(pad_token_id=0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 0.3
            layer.self_attn.k_proj.weight *= 0.3
    return mercer.attach(model, "darkformer", num_features=16, **options)


def scaled(model, batches):
    """Return the scaled queries [Hk, N, D] and keys of every layer, real tokens only."""
    found = {}

    def visit(name, mixer, seen):
        real, root = seen.real(), mixer.scale**0.5
        q = seen.q.unflatten(1, (mixer.num_kv_heads, -1))
        q = torch.stack([q[:, h].transpose(1, 2)[real].flatten(0, 1) for h in range(mixer.num_kv_heads)])
        k = torch.stack([seen.k[:, h][real] for h in range(mixer.num_kv_heads)])
        found.setdefault(name, []).append((root * q, root * k))

    watch(model, batches, visit)
    return {name: [torch.cat(side, 1) for side in zip(*calls, strict=True)] for name, calls in found.items()}


def second_moment(q, k):
    return (q.mT @ q / q.shape[1] + k.mT @ k / k.shape[1]) / 2


def batches_of(model):
    padded, mask, _ = left_padded(tokens(2, 30), [0, 11])
    return [{"input_ids": padded, "attention_mask": mask}, tokens(2, 25)]


def test_whitened_queries_and_keys_have_covariance_one_over_root_d():
    model = darkformer()
    batches = batches_of(model)
    report = mercer.calibrate(model, batches, mode="whiten")
    layer = next(layer for _, layer in attached(model))
    q, k = scaled(model, batches)["model.layers.0.self_attn"]  # the first layer's inputs did not change
    metric = layer.mixer.features.metric
    moment = second_moment(q @ metric.mT, k @ metric.mT)
    torch.testing.assert_close(moment, torch.eye(8).expand(2, 8, 8) * 8**-0.5, atol=2e-3, rtol=0)
    assert all(row.after == pytest.approx(8**-0.5, rel=1e-3) and row.holds for row in report.heads)
    assert len(report.heads) == 4
    assert report.tokens == 30 + 19 + 50
    assert "below 1/2 (Thm 3.2) in 4 of 4 key heads" in str(report)


def test_a_lower_rank_keeps_the_largest_directions():
    model = darkformer(rank=3)
    batches = batches_of(model)
    mercer.calibrate(model, batches, mode="whiten")
    q, k = scaled(model, batches)["model.layers.0.self_attn"]
    metric = next(layer for _, layer in attached(model)).mixer.features.metric
    torch.testing.assert_close(
        second_moment(q @ metric.mT, k @ metric.mT), torch.eye(3).expand(2, 3, 3) * 8**-0.5, atol=2e-3, rtol=0
    )
    values, vectors = torch.linalg.eigh(second_moment(q, k))
    assert (metric @ vectors[:, :, :-3]).abs().max() < 1e-2 * metric.abs().max()
    assert bool((values[:, -1] > 0).all())


def test_proposals_are_those_of_the_theorem_and_are_saved(tmp_path):
    model = darkformer()
    batches = batches_of(model)
    report = mercer.calibrate(model, batches, mode="proposal")
    assert all(row.holds and row.before == pytest.approx(row.after) for row in report.heads)
    q, k = scaled(model, batches)["model.layers.0.self_attn"]
    proposal = next(layer for _, layer in attached(model)).mixer.features.proposal
    torch.testing.assert_close(proposal @ proposal, optimal_proposal(second_moment(q, k)), atol=1e-3, rtol=1e-3)
    assert model.config.mercer["options"]["proposal"] is True
    ids = tokens(1, 9)
    with torch.no_grad():
        logits = model(ids).logits
        model.save_pretrained(tmp_path)
        assert torch.equal(mercer.load(tmp_path)(ids).logits, logits)


def test_the_better_proposal_estimates_better():
    ids, errors = [tokens(2, 40)], {}
    for calibrated in (False, True):
        found = []
        for seed in range(6):
            torch.manual_seed(0)
            model = darkformer(seed=seed)
            if calibrated:
                mercer.calibrate(model, ids, mode="proposal")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NumericalWarning)
                found.append(mercer.kernel_error(model, ids).layers[0].error)
        errors[calibrated] = sum(found)
    assert errors[True] < errors[False]


def test_lambda_outside_the_theorem_is_refused_and_nothing_changes():
    model = mercer.attach(llama(), "darkformer", num_features=16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    words = (
        r"Lambda has eigenvalues that are not below 1/2 in \d of 4 key heads \(model\.layers\..*; the largest is .*, "
        r"head \d of .*\): Thm 3\.2 has no proposal of finite variance there; center or whiten first, or pass clip="
    )
    with pytest.raises(ValueError, match=words):
        mercer.calibrate(model, [tokens(2, 20)], mode="proposal")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert "proposal" not in model.config.mercer["options"]
    with pytest.warns(
        NumericalWarning, match=r"eigenvalues of Lambda were lowered to 0\.45 in the proposals of \d of 4"
    ):
        report = mercer.calibrate(model, [tokens(2, 20)], mode="proposal", clip=0.45)
    assert not all(row.holds for row in report.heads)
    proposal = next(layer for _, layer in attached(model)).mixer.features.proposal
    assert torch.linalg.eigvalsh(proposal @ proposal).max() == pytest.approx(1.9 / 0.1, rel=1e-3)


def test_whitening_of_too_narrow_heads_warns_that_the_condition_fails():
    model = mercer.attach(llama(head_dim=4), "darkformer", num_features=16)
    with pytest.warns(NumericalWarning, match=r"after whiten, Lambda still has eigenvalues that are not below 1/2"):
        mercer.calibrate(model, [tokens(2, 40)], mode="whiten")


def test_too_little_text_is_said():
    model = mercer.attach(llama(num_hidden_layers=1), "darkformer", num_features=16)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.zero_()
    with pytest.warns(NumericalWarning, match="the queries and keys seen span fewer than 8 directions; give more text"):
        mercer.calibrate(model, [tokens(1, 3)], mode="whiten")


def test_particles_with_a_proposal_and_bidirectional_models():
    model = llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 0.1
            layer.self_attn.k_proj.weight *= 0.1
    mercer.attach(model, "particle", features="oprf", num_features=16)
    assert all(row.holds for row in mercer.calibrate(model, tokens(2, 20), mode="proposal").heads)
    class_name, arguments = BIDIRECTIONAL["bert"]
    encoder = mercer.attach(build(class_name, **arguments), "darkformer", num_features=16)
    assert all(row.holds for row in mercer.calibrate(encoder, tokens(2, 20), mode="whiten").heads)


@torch.no_grad()
def test_centres_are_the_means_and_are_saved(tmp_path):
    model = darkformer()
    batches = batches_of(model)
    report = mercer.calibrate(model, batches)
    q, k = scaled(model, batches)["model.layers.0.self_attn"]
    mixer = next(layer for _, layer in attached(model)).mixer
    torch.testing.assert_close(mixer.scale**0.5 * mixer.key_center, k.mean(1))
    torch.testing.assert_close(mixer.scale**0.5 * mixer.query_center, q.mean(1))
    spread = (torch.cov(q[0].T, correction=0) + torch.cov(k[0].T, correction=0)) / 2
    assert report.heads[0].after == pytest.approx(torch.linalg.eigvalsh(spread)[-1].item(), rel=1e-3)
    assert all(row.after <= row.before for row in report.heads)
    again = mercer.calibrate(model, batches)
    assert again.heads[0].before == pytest.approx(report.heads[0].after)
    assert model.config.mercer["options"]["center"] is True
    ids = tokens(1, 9)
    logits = model(ids).logits
    model.save_pretrained(tmp_path)
    assert torch.equal(mercer.load(tmp_path)(ids).logits, logits)


@torch.no_grad()
def test_whitening_is_about_the_centres():
    model = darkformer(window=4, sinks=1, center=True)
    batches = batches_of(model)
    mercer.calibrate(model, batches, mode="center")
    mercer.calibrate(model, batches, mode="whiten")
    q, k = scaled(model, batches)["model.layers.0.self_attn"]
    metric = next(layer for _, layer in attached(model)).mixer.features.metric
    q, k = ((t - t.mean(1, keepdim=True)) @ metric.mT for t in (q, k))
    torch.testing.assert_close(second_moment(q, k), torch.eye(8).expand(2, 8, 8) * 8**-0.5, atol=2e-3, rtol=0)


def test_refusals():
    ids = [tokens(1, 9)]
    model = mercer.attach(llama(), "performer", num_features=16)
    with pytest.raises(ValueError, match=r"unknown mode 'whitten'; choose one of .*did you mean 'whiten'"):
        mercer.calibrate(model, ids, mode="whitten")
    with pytest.raises(ValueError, match=r"carries Performer, which has no metric M to whiten with"):
        mercer.calibrate(model, ids, mode="whiten")
    with pytest.raises(ValueError, match=r"carries Performer, whose features have no proposal; attach darkformer"):
        mercer.calibrate(model, ids, mode="proposal")
    with pytest.raises(ValueError, match=r"clip \(0\.7\) belongs to mode='proposal' and must lie between 0 and 1/2"):
        mercer.calibrate(model, ids, mode="proposal", clip=0.7)
    with pytest.raises(ValueError, match=r"carries Softmax, which has no features to calibrate"):
        mercer.calibrate(mercer.attach(llama(), "softmax"), ids, mode="whiten")
    with pytest.raises(ValueError, match=r"carries Particle, which has no centres; attach performer"):
        mercer.calibrate(mercer.attach(llama(), "particle", num_features=16), ids)
    with pytest.raises(ValueError, match="carries no mixer"):
        mercer.calibrate(llama(), ids, mode="whiten")
