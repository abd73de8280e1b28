"""Our operators, registered so that a process that compiles nothing never imports torch.compile's machinery.

``torch.library.custom_op`` imports it at an operator's first call: a second of a first step, or more. It also checks at
every call that no output shares memory with an input, which tests check here (``torch.library.opcheck``).
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.compiler.config

_LIBRARY = globals().get("_LIBRARY") or torch.library.Library("gristmill", "FRAGMENT")
# By name. Both outlive a reload of this module: where a library goes, calling its operators crashes the process.
_OPERATORS: "dict[str, Operator]" = globals().get("_OPERATORS", {})
_DIGESTS: dict[str, str] = globals().get("_DIGESTS", {})  # of the files that define operators, by module
_OTHER_TAG: str = globals().get("_OTHER_TAG", torch.compiler.config.cache_key_tag)


class Operator:
    """An operator ``gristmill::name`` that torch.compile takes as a whole; a call runs ``function``.

    ``function`` has annotations that ``torch.library.infer_schema`` reads, changes none of its arguments and returns
    new tensors. Differentiating it raises RuntimeError until ``register_autograd`` was called.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.__doc__ = function.__doc__
        self._name = f"gristmill::{name}"
        self._schema = torch.library.infer_schema(function, mutates_args=())
        self._function = function
        self._fake: Callable[..., Any] | None = None
        self._backward: Callable[..., Any] | None = None
        self._setup_context: Callable[..., None] | None = None
        _tell_versions_apart(function)
        _LIBRARY.define(f"{name}{self._schema}", tags=(torch.Tag.pt2_compliant_tag,))
        _leave_uncompiled(Operator._run)
        _LIBRARY.impl(name, self._run, "CompositeExplicitAutograd")
        torch.library.register_fake(self._name, self._run_fake, lib=_LIBRARY)
        torch.library.register_autograd(self._name, self._differentiate, setup_context=self._keep, lib=_LIBRARY)
        self._overload = getattr(torch.ops.gristmill, name).default

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the operator."""
        return self._overload(*arguments, **named)

    def replace(self, function: Callable[..., Any]) -> None:
        """Run ``function`` from now on: what a reload of the module that defines it asks for."""
        schema = torch.library.infer_schema(function, mutates_args=())
        if schema != self._schema:
            raise RuntimeError(f"{self._name}{self._schema} cannot become {schema} in this process: start a new one")
        _tell_versions_apart(function)
        self._function = function

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Say what the outputs look like: ``fake`` returns tensors of their shapes and dtypes, with no values."""
        self._fake = fake
        return fake

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Say how to differentiate it, as ``torch.library.register_autograd`` does."""
        self._backward, self._setup_context = backward, setup_context

    def _run(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def _run_fake(self, *arguments: Any) -> Any:
        if self._fake is None:
            raise RuntimeError(f"{self._name} has no fake: torch.compile cannot see its outputs")
        return self._fake(*arguments)

    def _differentiate(self, ctx: Any, *grads: Any) -> Any:
        if self._backward is None:
            raise RuntimeError(f"{self._name} has no gradient: it is called where none is needed, or inside a backward")
        return self._backward(ctx, *grads)

    def _keep(self, ctx: Any, inputs: tuple, output: Any) -> None:
        if self._setup_context is not None:
            self._setup_context(ctx, inputs, output)


def _tell_versions_apart(function: Callable[..., Any]) -> None:
    """Have torch.compile's caches on disk look up compiled code by what the file of ``function`` holds, too.

    They know a graph by the names of its operators. Code compiled with another version's backward, which is beside the
    operator in its file, would be found again and run.
    """
    path = Path(function.__code__.co_filename)
    if path.is_file():  # and was not typed into an interpreter
        _DIGESTS[function.__module__] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        torch.compiler.config.cache_key_tag = " ".join([_OTHER_TAG, *sorted(_DIGESTS.values())]).strip()


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

    def make(function: Callable[..., Any]) -> Operator:
        if name in _OPERATORS:
            _OPERATORS[name].replace(function)
        else:
            _OPERATORS[name] = Operator(name, function)
        return _OPERATORS[name]

    return make
