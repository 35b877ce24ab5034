"""The passes' base classes: onnx_ir's, with a contract that each call checks; the error names the pass."""

from __future__ import annotations

from abc import abstractmethod

import onnx_ir as ir

from archipel.graph.build import Builder


class GraphPass(ir.passes.InPlacePass):
    """A pass that changes a model in place. Inputs stay, and outputs keep their number, order and names.

    A call raises onnx_ir's PostconditionError if that does not hold, and what a subclass raises in `requires` and
    `ensures`.
    """

    @abstractmethod
    def change(self, model: ir.Model) -> bool:
        """Change the model. Returns whether anything but shapes changed."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        inputs, outputs = list(model.graph.inputs), _names(model)
        modified = self.change(model)
        if list(model.graph.inputs) != inputs or _names(model) != outputs:
            raise ir.passes.PostconditionError(
                f"{type(self).__name__} changed the inputs or outputs of the model, which were "
                f"{', '.join(str(value.name) for value in inputs)} -> {', '.join(outputs)}"
            )
        return ir.passes.PassResult(model, modified)


class LevelPass(GraphPass):
    """A pass that changes the main graph, then every body, each on its own."""

    @abstractmethod
    def change_level(self, op: Builder) -> bool:
        """Change the builder's graph. Returns as `change`."""

    def change(self, model: ir.Model) -> bool:
        root = Builder(model.graph)
        modified = self.change_level(root)
        for body in model.graph.subgraphs():
            modified |= self.change_level(Builder(body, outer=root))
        return modified


class Pipeline(ir.passes.Sequential):
    """Passes one after the other.

    An exception of a pass is raised as it is, with a note that names the pass. onnx_ir wraps it in a PassError, which
    callers that catch archipel's errors would miss.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        try:
            return super().call(model)
        except ir.passes.PassError as error:
            cause = error.__cause__
            if cause is None:
                raise
            cause.add_note(str(error))
            raise cause from cause.__cause__


class InlinedPipeline(Pipeline):
    """Passes for a model without functions, whose bodies they would not look into."""

    def requires(self, model: ir.Model) -> None:
        if model.functions:
            names = ", ".join(f"{domain}.{name}" for domain, name, _ in model.functions)
            raise ir.passes.PreconditionError(f"the model has the functions {names}; call inline_functions before")


def _names(model: ir.Model) -> list[str]:
    return [str(value.name) for value in model.graph.outputs]
