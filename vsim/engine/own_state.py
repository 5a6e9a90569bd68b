"""State of a model beside its trainable parameters and registered buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn

from vsim.cluster.replicas import Replicas
from vsim.engine.kept import Kept, apart, joined, written_to
from vsim.engine.objective import Objective
from vsim.engine.python_state import Holder, Place, State, at, attributes, changed, dotted
from vsim.engine.stacked import NodesDifferError
from vsim.private_torch import is_wrapped, version


class OwnState:
    """Gives every node numbers of its own, and refuses state that the nodes would share silently.

    The numbers of `vsim.engine.python_state` are for models that count in Python. The first step shows whether a model
    does; if it does not, they are left alone, but looked at again at steps 2, 4, 8 and so on. If all that it changes is
    tensors in attributes of its modules, such as a part of the loss, only these are looked at in between. A change
    between two calls, as by a callback, is for all nodes.

    Args:
        replicas: the nodes. objective: whose modules these are; it holds the numbers of all nodes, so that several
            executors of a run may take turns.
    """

    def __init__(self, replicas: Replicas, objective: Objective) -> None:
        self.replicas, self.objective = replicas, objective
        self._steps = 0
        self._places: set[Place] = set()  # of what it has changed
        self._places_between: set[Place] = set()  # of what was changed since the last call that was looked at
        self._attributes: list[Holder] | None = None  # what has them, if they are all tensors
        self._in_step = False
        self._strangers = {
            id(p): name for model in (objective.model, *objective.originals) for name, p in model.named_parameters()
        }
        self._made: dict[str, tuple[int, int]] | None = None  # buffers that forward has made, after the first step
        self._may_make = self._may_reach = True
        self.begin()
        self._steps = 0

    def begin(self) -> None:
        """Look at the state before a step: between steps it may be changed."""
        self._steps += 1
        self._looks = self._steps.bit_count() == 1  # 1, 2, 4, 8 …
        self._may_count = self._looks or bool(self._places)
        if self._looks:
            self._attributes, self._known = None, frozenset(self._places)
        self._frozen = {name: (t, version(t)) for name, t in self.replicas.frozen.items()}
        self._of_loss = {n: (b, version(b)) for n, b in self._loss_buffers() if self.replicas.num_held > 1}

    def of(self, rows: range) -> AbstractContextManager[None]:
        """Within this context the numbers are those of the nodes of some rows, for which the model is called at once.

        Raises:
            NodesDifferError: they are not the same for these nodes.
        """
        return self._counting(rows) if self._may_count else nullcontext()

    @contextmanager
    def _counting(self, rows: range) -> Iterator[None]:
        objective = self.objective
        nodes = rows if objective.callers is None else [objective.callers[row] for row in rows]
        now = objective.left if self._in_step else self._read()
        if self._looks and not self._in_step:
            self._places_between = {*changed(objective.left, now)}
        objective.follow(now)
        states = [objective.numbers.get(node, objective.others) for node in nodes]
        try:
            own = joined(states)
        except ValueError as error:
            node, other = next((n, s) for n, s in zip(nodes, states, strict=True) if changed(states[0], s))
            raise NodesDifferError(
                f"{dotted(changed(states[0], other))} differs between nodes {nodes[0]} and {node}, and the model's "
                "Python runs once for both; with executor='loop' it runs for each"
            ) from error
        if own != now:
            self._write(own)
        self._in_step = True  # nobody changes anything between nodes
        try:
            yield
        except BaseException:  # such as of a vmapped call, in whose place the loop computes the nodes
            self._write(now)
            raise
        left = self._read()
        places = changed(own, left)
        written = written_to([at(own, place) for place in places], [at(left, place) for place in places])
        if written:
            names = dotted([places[i] for i in written])
            raise ValueError(
                f"the model changes {names} in place, a tensor that nodes may share: make it a buffer "
                "(register_buffer), of which every node has its own, or assign a new tensor"
            )
        self._places.update(places)
        paths = None if self._attributes is None else [holder.path for holder in self._attributes]
        objective.numbers.update(zip(nodes, apart(left, len(nodes), paths), strict=True))
        objective.left = objective.numbers[nodes[-1]]
        if objective.left is not left:
            self._write(objective.left)

    def _read(self) -> State:
        left = self.objective.left
        if self._attributes is None:
            return self.objective.read()
        return {**left, **{h.path: {**left.get(h.path, {}), **h.read()} for h in self._attributes}}

    def _write(self, state: State) -> None:
        if self._attributes is None:
            self.objective.write(state)
        for holder in self._attributes or ():
            own = state.get(holder.path, {})
            holder.write({name: own[name] for name in holder.names or () if name in own})

    def _look_at_tensors_alone(self) -> None:
        """If all that has changed are tensors in attributes, look at nothing else from now on."""
        numbers = self.objective.numbers
        found = [at(own, place)[2:] for own in numbers.values() for place in self._places]
        if not all(isinstance(value, Kept) or value is None for values in found for value in values):
            return
        self._attributes = attributes(self._places, self.objective.model)
        if self._attributes is None:
            return
        base = self.objective.left  # all else is one for all nodes, and soon compared
        for node, own in numbers.items():
            numbers[node] = {**base, **{h.path: own.get(h.path, {}) for h in self._attributes}}

    def kept(self) -> dict[str, tuple[nn.Module, str]]:
        """Return path → module and attribute, where a step has left tensors; none if it has left other things."""
        found = {f"{h.path}.{name}": (h.path, name) for h in self._attributes or () for name in h.names or ()}
        places = {path: (self.objective.get_submodule(module), name) for path, (module, name) in found.items()}
        return {path: place for path, place in places.items() if isinstance(getattr(*place, None), Tensor)}

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Within this context the model may count; afterwards it has not."""
        before = self.objective.read() if self._may_count else None
        try:
            yield
        finally:
            if before is not None:
                self.objective.write(before)

    def check_reached(self, losses: Tensor) -> None:
        """Raise a ValueError if losses depend on parameters of the model that are no node's; the first step tells.

        A node's own tensors take the places of its parameters: whoever holds a parameter in a list, say, has that of
        before, and so has a loss function that names the model which was given to the trainer.
        """
        nodes = [losses.grad_fn] if self._may_reach else []
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            name = self._strangers.get(id(getattr(node, "variable", None)))
            if name is not None:
                raise ValueError(
                    f"the loss depends on {name} not by the module that has it but by another way, such as a list, a "
                    "closure or a global variable, where it is no node's own and never trained: take it from its "
                    "module, in forward"
                )
            found = {following for following, _ in getattr(node, "next_functions", ()) if following is not None}
            nodes += found - seen
            seen |= found

    def check(self) -> None:
        """Check the state of the model after a step.

        Raises:
            ValueError: a frozen parameter has changed; the model has counted for all nodes alike; or forward has
                created a buffer that is not the same for all nodes and steps. The first two steps tell; a constant
                buffer, such as a mask, does no harm.
        """
        self._in_step = self._may_reach = False
        if self._looks:
            mixed = (self._places - self._known) & self._places_between
            if self._steps > 1 and mixed:
                raise ValueError(
                    f"the model changes {dotted([*mixed])}, but began to at a step after the first, and the nodes have "
                    "shared it since: let it change that from the first step on, or make it a buffer"
                )
            self._places |= self.objective.differing()  # since a step before this executor's first
            self._look_at_tensors_alone()
        self._may_count = bool(self._places)
        for name, (tensor, at_first) in self._frozen.items():
            if version(tensor) != at_first:
                raise ValueError(
                    f"the model changes {name} in forward, a parameter that requires no gradient and that the nodes "
                    "share: make it a buffer (register_buffer), of which every node has its own"
                )
        if self._of_loss:
            for name, buffer in self._loss_buffers():
                tensor, at_first = self._of_loss.get(name, (buffer, version(buffer)))
                if buffer is not tensor or version(tensor) != at_first:
                    raise ValueError(
                        f"loss_fn changes its buffer {name}, which all nodes that are computed together share: make it "
                        "a buffer of the model, which returns its loss itself, so that every node has its own"
                    )
        if not self._may_make:
            return
        made = {n: b for n, b in self.objective.model.named_buffers() if n not in self.replicas.buffers}
        now = {name: (id(b), version(b)) for name, b in made.items()}
        own = [name for name, b in made.items() if is_wrapped(b)]
        if self._made is not None:
            own += [name for name in now if now[name] != self._made.get(name)]
        if own:
            raise ValueError(
                f"the model makes buffers in forward: {', '.join(own)}; register them with a tensor of their shape, so "
                "that every node has its own"
            )
        self._may_make, self._made = bool(made) and self._made is None, now

    def _loss_buffers(self) -> list[tuple[str, Tensor]]:
        loss_fn = self.objective.loss_fn
        return list(loss_fn.named_buffers()) if isinstance(loss_fn, nn.Module) else []
