"""What the passes here have in common: onnx_ir's passes, held to a contract; one that breaks it is named."""

from __future__ import annotations

from abc import abstractmethod

import onnx_ir as ir

from archipel.graph.build import Builder


class GraphPass(ir.passes.InPlacePass):
    """A pass that changes the model it is given. Inputs stay, and outputs keep their number, order and names.

    Calling it raises onnx_ir's PreconditionError or PostconditionError where that does not hold, or what a subclass
    requires and ensures beyond it.
    """

    @abstractmethod
    def change(self, model: ir.Model) -> bool:
        """Change the model. Returns whether it did more than make shapes more exact."""

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
    """A pass that looks at the graph, then at every body in it, each by itself."""

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

    What a pass raises comes out as it is, with a note that says where. onnx_ir would wrap it in a PassError, and who
    catches archipel's errors would not get them.
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
    """Passes for a model without functions: what their bodies do would not be seen."""

    def requires(self, model: ir.Model) -> None:
        if model.functions:
            names = ", ".join(f"{domain}.{name}" for domain, name, _ in model.functions)
            raise ir.passes.PreconditionError(f"the model has the functions {names}; call inline_functions before")


def _names(model: ir.Model) -> list[str]:
    return [str(value.name) for value in model.graph.outputs]
