"""What every precision must keep, as a test class; `acc_plugins.testing` is its front door."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from acc_plugins.outcome import StepOutcome
from acc_plugins.precisions.precision import Precision

_FEATURES = 5


class PrecisionContract:
    """Outputs are float32 in every structure; weights and gradients stay float32; a copy works; nothing keeps a model alive; training comes
    near float32's; a skipped step says so; state goes through a checkpoint; unwrap restores the model."""

    device: ClassVar[str] = "cpu"
    tolerance: ClassVar[float] = 0.05  # of a loss, against float32

    def make_precision(self, **options: Any) -> Precision:
        """The precision under test; `options` are those of its scaler, for precisions that have one."""
        raise NotImplementedError

    def test_outputs_are_float32_in_every_structure(self) -> None:
        model = self.make_precision().wrap(_Structured().to(self.device))
        out = model(torch.ones(2, 3, device=self.device))
        assert [t.dtype for t in (out["a"], out["b"][0], out["b"][1])] == [
            torch.float32,
            torch.float32,
            torch.int64,
        ]
        out["a"].sum().backward()
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)

    def test_training_comes_near_float32(self) -> None:
        losses = [self._losses(precision) for precision in (Precision(), self.make_precision())]
        assert losses[0][-1] < losses[0][0]
        torch.testing.assert_close(losses[1], losses[0], rtol=self.tolerance, atol=self.tolerance)

    def test_context_computes_as_a_wrapped_model_does(self) -> None:
        precision = self.make_precision()
        model = _float_model().to(self.device)
        x = torch.ones(2, _FEATURES, device=self.device)
        wrapped = precision.wrap(copy.deepcopy(model))
        with precision.context():
            expected = model(x)
        assert torch.equal(expected.float(), wrapped(x))

    def test_unwrap_restores_the_model_exactly(self) -> None:
        precision = self.make_precision()
        model = _float_model().to(self.device)
        before, kind = dict(vars(model)), type(model)
        x = torch.ones(2, _FEATURES, device=self.device)
        expected = model(x)
        wrapped = precision.wrap(model)
        wrapped(x)
        assert precision.unwrap(wrapped) is model
        assert (type(model), dict(vars(model))) == (kind, before)
        assert torch.equal(model(x), expected)

    def test_a_deep_copy_of_a_wrapped_model_is_independent(self) -> None:
        model = self.make_precision().wrap(_float_model().to(self.device))
        x = torch.ones(2, _FEATURES, device=self.device)
        twin, expected = copy.deepcopy(model), model(x)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        assert torch.equal(twin(x), expected)
        forward: Any = twin.forward
        assert forward.__self__ is twin

    def test_a_wrapped_model_is_freed_without_the_garbage_collector(self) -> None:
        precision = self.make_precision()
        gc.collect()
        gc.disable()
        try:
            model = precision.wrap(_float_model().to(self.device))
            gone = weakref.ref(model)
            del model
            assert gone() is None
        finally:
            gc.enable()

    def test_unscale_gives_true_gradients_however_often_it_is_called(self) -> None:
        precision = self.make_precision()
        model = precision.wrap(_float_model().to(self.device))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(2, _FEATURES, device=self.device)
        loss = model(x).square().mean()
        expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        precision.scale(loss).backward()
        for _ in range(3):
            precision.unscale(optimizer)
        for p, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, gradient, rtol=0.02, atol=1e-4)
        assert precision.step(optimizer).ran

    def test_a_step_that_overflowed_says_so_and_changes_nothing(self) -> None:
        precision = self.make_precision()
        if precision.scaler is None:
            return
        model = precision.wrap(_float_model().to(self.device))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        before = _copied(model.state_dict())
        scale = precision.scaler.get_scale()
        precision.scale(model(torch.full((2, _FEATURES), float("inf"), device=self.device)).sum()).backward()
        assert precision.step(optimizer) == StepOutcome(False, None)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert precision.scaler.get_scale() < scale

    def test_state_goes_through_a_checkpoint(self) -> None:
        precision, other = self.make_precision(), self.make_precision()
        self._losses(precision)
        other.load_state_dict(precision.state_dict())
        assert other.state_dict() == precision.state_dict()

    def _losses(self, precision: Precision) -> Tensor:
        model = precision.wrap(_float_model().to(self.device))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(16, _FEATURES, generator=generator).to(self.device)
        losses = []
        for _ in range(10):
            loss = mse_loss(model(x), x.sum(1, keepdim=True))
            precision.scale(loss).backward()
            precision.unscale(optimizer)
            assert precision.step(optimizer).ran
            optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses)


class _Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        out = self.layer(x)
        return {"a": out, "b": (out * 2, out.argmax(1))}


def _float_model() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(_FEATURES, 7), nn.Tanh(), nn.Linear(7, 1))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 2)
    return model


def _copied(state: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}
