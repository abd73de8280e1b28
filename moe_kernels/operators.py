"""Our operators, registered so that a process that compiles nothing never imports torch.compile's machinery.

``torch.library.custom_op`` imports it at an operator's first call: a second of a first step, or more. It also checks at
every call that no output shares memory with an input, which tests check here (``torch.library.opcheck``).
"""

from collections.abc import Callable
from typing import Any

import torch

# One for each operator. Kept when this module is reloaded: where a library goes, its operators crash their callers.
_LIBRARIES: dict[str, torch.library.Library] = globals().get("_LIBRARIES", {})


class Operator:
    """An operator ``gristmill::name`` that torch.compile takes as a whole; a call runs ``function``.

    ``function`` has annotations that ``torch.library.infer_schema`` reads, changes none of its arguments and returns
    new tensors. Differentiating it raises RuntimeError until ``register_autograd`` was called.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.__doc__ = function.__doc__
        self._name = f"gristmill::{name}"
        self._backward: Callable[..., Any] | None = None
        self._setup_context: Callable[..., None] | None = None
        if name in _LIBRARIES:  # the module that defines it is reloaded
            _LIBRARIES.pop(name)._destroy()
        library = _LIBRARIES[name] = torch.library.Library("gristmill", "FRAGMENT")
        schema = torch.library.infer_schema(function, mutates_args=())
        library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        _leave_uncompiled(function)
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_autograd(self._name, self._differentiate, setup_context=self._keep, lib=library)
        self._library = library
        self._overload = getattr(torch.ops.gristmill, name).default

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the operator."""
        return self._overload(*arguments, **named)

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Say what the outputs look like: ``fake`` returns tensors of their shapes and dtypes, with no values."""
        torch.library.register_fake(self._name, fake, lib=self._library)
        return fake

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Say how to differentiate it, as ``torch.library.register_autograd`` does."""
        self._backward, self._setup_context = backward, setup_context

    def _differentiate(self, ctx: Any, *grads: Any) -> Any:
        if self._backward is None:
            raise RuntimeError(f"{self._name} has no gradient: it is called where none is needed, or inside a backward")
        return self._backward(ctx, *grads)

    def _keep(self, ctx: Any, inputs: tuple, output: Any) -> None:
        if self._setup_context is not None:
            self._setup_context(ctx, inputs, output)


def _leave_uncompiled(function: Callable[..., Any]) -> None:
    """Have torch.compile skip what a call of ``function`` runs, where code that it compiles only in part calls it.

    As ``torch.compiler.disable`` does, which would import all of torch._dynamo.
    """
    try:
        from torch._C._dynamo.eval_frame import (  # noqa: PLC0415 - not public; without it such code is slower, no more
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )
    except ImportError:
        return
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Return a decorator that makes a function the operator ``gristmill::name``."""
    return lambda function: Operator(name, function)
