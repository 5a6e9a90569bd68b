"""The model as per-node code sees it: parameters and gradients of all nodes behind the names of one."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from vsim.cluster.replicas import Columns, Replicas


class StackedModel(nn.Module):
    """The user's model with stacked parameters (K, *shape), which are views of the node matrix, as are their `.grad`.

    Elementwise code that is written for one node (`p.grad.div_(2)`, `p.mul_(0.9)`, `p.grad = sign(p.grad)`) runs
    for all nodes at once. Trainable parameters only: the frozen ones are shared and never change.
    """

    def __init__(self, replicas: Replicas) -> None:
        super().__init__()
        self._replicas = replicas
        self._stacked: dict[str, nn.Parameter] | None = None
        self._views: list[tuple[nn.Parameter, Tensor, Tensor]] = []

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, stacked parameter (K, *shape)), in the order of the user's model."""
        for name, parameter in self._parameters_by_name().items():
            yield (f"{prefix}.{name}" if prefix else name), parameter

    def __deepcopy__(self, memo: object) -> StackedModel:
        """A copy with its own memory: the snapshot that strategies keep of the weights."""
        replicas = self._replicas
        return StackedModel(
            Replicas(
                replicas.module,
                replicas.layout,
                replicas.weights.clone(),
                replicas.grads.clone(),
                copy.deepcopy(replicas.buffers),
                replicas.frozen,
                replicas.num_held,
                replicas.first_node,
            )
        )

    @property
    def columns(self) -> Sequence[Columns]:
        """The columns of every parameter in the node matrix."""
        return self._replicas.layout

    @property
    def of_one_node(self) -> nn.Module:
        """The user's model, whose own tensors are not used."""
        return self._replicas.module

    def write_back(self) -> None:
        """Copy assigned tensors (`p.grad = …`, `p.data = …`) into the matrix, which all other code reads."""
        for parameter, weights, grads in self._views:
            if parameter.data_ptr() != weights.data_ptr():
                weights.copy_(parameter)
                parameter.data = weights
            if parameter.grad is None:
                grads.zero_()
            elif parameter.grad.data_ptr() != grads.data_ptr() or parameter.grad.shape != grads.shape:
                grads.copy_(parameter.grad)
            else:
                continue
            parameter.grad = grads

    def _parameters_by_name(self) -> dict[str, nn.Parameter]:
        if self._stacked is None:  # on first use: strategies that work on the matrix never need them
            self._stacked = {}
            weights = self._replicas.views(self._replicas.weights)
            grads = self._replicas.views(self._replicas.grads)
            for name, view in weights.items():
                parameter = nn.Parameter(view)
                parameter.grad = grads[name]
                parameter.is_stacked = True  # type: ignore[attr-defined]
                self._stacked[name] = parameter
                self._views.append((parameter, view, grads[name]))
        return self._stacked


class StateByParameter(defaultdict[Any, Any]):
    """The state of an optimizer that steps all nodes as one matrix, also by the stacked parameters of the model.

    Args:
        state: the optimizer's own. optimizer: its only parameter is the matrix (R, pitch).
        model: whose parameters views are asked for.
    """

    def __init__(self, state: Mapping[Any, Any], optimizer: Optimizer, model: StackedModel) -> None:
        super().__init__(dict, state)
        (self._matrix,) = optimizer.param_groups[0]["params"]
        self._columns: dict[Any, Columns] = dict(zip(model.parameters(), model.columns, strict=True))

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of a parameter: tensors (K, *shape) that share the optimizer's memory."""
        columns = self._columns.get(key)
        if columns is None:
            return super().get(key, default)
        own = super().get(self._matrix)
        if not own:
            return default
        shape, of_matrix = self._matrix.shape, slice(columns.start, columns.stop)
        return MappingProxyType(
            {
                name: value[:, of_matrix].unflatten(1, columns.shape or (1,)).view(len(value), *columns.shape)
                if isinstance(value, Tensor) and value.shape == shape
                else value
                for name, value in own.items()
            }
        )

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())

    def __contains__(self, key: object) -> bool:
        return super().__contains__(self._matrix if key in self._columns else key)

    def __getitem__(self, key: Any) -> Any:
        return self.get(key, MappingProxyType({})) if key in self._columns else super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if key in self._columns:
            raise TypeError("optim.state takes no state of your own here: keep it in an attribute of the strategy")
        super().__setitem__(key, value)


class PerNodeStep(ExitStack):
    """The context of a strategy's own `step`, which is written as if for one node and may call its optimizer itself.

    Before the optimizer steps, tensors that such code has assigned are copied into the matrix, and the gradients are
    clipped.

    Args:
        model: the stacked model. optimizers: in the order in which they are stepped, one or one per node; none if the
            step is the common one.
        clip: clips every node's gradient.
        stepped: called when the optimizer has stepped.
    """

    def __init__(
        self,
        model: StackedModel,
        optimizers: Sequence[Optimizer],
        clip: Callable[[], None],
        stepped: Callable[[], None],
    ) -> None:
        super().__init__()

        def prepare(*_: Any) -> None:
            model.write_back()
            clip()

        if optimizers:
            self.callback(optimizers[0].register_step_pre_hook(prepare).remove)
            self.callback(optimizers[-1].register_step_post_hook(lambda *_: stepped()).remove)
