"""The engine program: vLLM's OpenAI server behind Gyre's gate. The one importer of vLLM, with what runs inside it.

`python -m gyre.cell.engine` is a child of a supervisor (`gyre.cell.engine_client`): it reads its settings as one line
from the socket in GYRE_CHILD_FD, says there how far it is and where it serves, and ends when the other side closes.
By hand: `python -m gyre.cell.engine '{"model": "...", "secret": "..."}'`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gyre.cell.engine_process import remove_segments, shared_segments
from gyre.child import die_with_parent
from gyre.errors import EXIT_FAULT, EXIT_OK, EXIT_USER, UserError

if TYPE_CHECKING:
    from gyre.cell.kv_source import Source

log = logging.getLogger("gyre.engine")

MIB = 1 << 20
SHUTDOWN_SECONDS = 2.0  # for workers on GPUs to leave by themselves
#: A model's own sampling defaults are not used: an execution samples from the policy unless its harness says otherwise.
NEUTRAL_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


class Parent:
    """The supervisor, as the engine sees it: settings in, words out, and the end of both."""

    def __init__(self, sock: socket.socket | None) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    def settings_line(self) -> bytes:
        """The one line that the supervisor sends."""
        assert self._socket is not None
        data = b""
        while not data.endswith(b"\n"):
            piece = self._socket.recv(1 << 16)
            if not piece:
                os._exit(EXIT_FAULT)
            data += piece
        return data

    def say(self, kind: str, **words: Any) -> None:
        """Tell the supervisor how far this is."""
        log.info("%s %s", kind, " ".join(f"{key}={value}" for key, value in words.items()))
        if self._socket is not None:
            with self._lock:
                self._socket.sendall(json.dumps({"event": {"type": kind, **words}}).encode() + b"\n")

    def watch(self) -> None:
        """End this process and its children at once when the supervisor is gone, whatever else goes on here."""
        if self._socket is not None:
            threading.Thread(target=self._end_with_parent, name="parent", daemon=True).start()

    def _end_with_parent(self) -> None:
        assert self._socket is not None
        try:
            while self._socket.recv(4096):
                pass
        except OSError:
            pass
        directory = os.environ.get("VLLM_RPC_BASE_PATH", "")
        if Path(directory).name.startswith("gyre-engine-"):
            shutil.rmtree(directory, ignore_errors=True)
        remove_segments(shared_segments(os.getpid()))
        if os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(EXIT_FAULT)


def flags(args: dict[str, Any]) -> list[str]:
    """Command-line flags of a mapping: true and false as switches, mappings as JSON, lists as several words."""
    words: list[str] = []
    for key, value in args.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, dict):
            words += [f"--{name}", json.dumps(value)]
        elif isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        elif value is not None:
            words += [f"--{name}", str(value)]
    return words


def kv_bytes(settings: Any) -> int:
    """KV cache on a CPU: what every slot needs at full length, but at least 16 MiB."""
    from gyre.models import parameters

    model = parameters(Path(settings.model))
    item = 4 if settings.dtype == "float32" else 2
    token = 2 * model["layers"] * model["kv_heads"] * model["head_dim"] * item
    return max(16 * MIB, token * (settings.max_context + 32) * settings.slots)


def server_flags(settings: Any) -> list[str]:
    """All flags of vLLM's server; those of the configuration come last and win."""
    args: dict[str, Any] = {
        "model": settings.model,
        "served-model-name": settings.served_name,
        "dtype": settings.dtype,
        "max-model-len": settings.max_context,
        "max-num-seqs": settings.slots,
        "host": settings.host,
        "port": settings.port,
        "seed": settings.seed,
        "logprobs-mode": "processed_logprobs",
        "override-generation-config": NEUTRAL_SAMPLING,
        "enable-prefix-caching": True,
        "enable-prompt-tokens-details": True,
        "enable-scale-out": True,  # for /v1/chat/completions/render; the gate lets nothing else of it through
        "disable-uvicorn-access-log": True,
        "disable-fastapi-docs": True,
    }
    if settings.gpus:
        args |= {
            "tensor-parallel-size": settings.gpus,
            "gpu-memory-utilization": 0.85,
            "enable-sleep-mode": True,
            "worker-extension-cls": "gyre.cell.engine_worker.Weights",
        }
    else:
        args |= {
            "enforce-eager": True,
            "block-size": 32,
            "max-num-batched-tokens": 2048,
            "kv-cache-memory-bytes": kv_bytes(settings),
            "distributed-executor-backend": "uni",
            "worker-cls": "gyre.cell.engine_worker_cpu.CpuWorker",
        }
    own = {key.replace("_", "-"): value for key, value in settings.args.items()}
    return flags({**args, **own})


def kv_source(settings: Any) -> Source | None:
    """The giving side of KV handoffs, where they are configured; without, nothing of it is loaded."""
    if settings.kv is None:
        return None
    from gyre.cell.kv_source import Source

    return Source(settings.secret, settings.kv["timeout"])


def kv_flags(settings: Any, source: Source | None) -> list[str]:
    """Flags, and the environment, by which vLLM has the connector of a KV handoff.

    Raises:
        UserError: the configuration's own flags have a connector too, or want what does not go with one.
    """
    if source is None:
        return []
    from gyre.cell.kv_connector import transfer_config
    from gyre.cell.kv_scheduler import KEY_VARIABLE

    own = {key.replace("_", "-"): value for key, value in settings.args.items()}
    if "kv-transfer-config" in own:
        raise UserError("serving.kv_handoff has a connector of its own; remove engine.args.kv-transfer-config")
    if own.get("async-scheduling"):
        raise UserError("serving.kv_handoff does not go with engine.args.async-scheduling; remove one of them")
    os.environ[KEY_VARIABLE] = settings.secret
    config = transfer_config(source.path, settings.kv["transport"], settings.kv["limit"])
    # Where a load fails, vLLM takes the step's token back, but not that of a step that it has scheduled behind it.
    return flags({"kv-transfer-config": config, "async-scheduling": False})


def load_libraries() -> None:
    """Import what an engine needs: nearly all of its start. A CPU engine may be forked from a process that did this."""
    import vllm.entrypoints.launchers.api_server.entry  # noqa: F401
    import vllm.entrypoints.launchers.cli_args  # noqa: F401
    import vllm.v1.engine.core  # noqa: F401

    import gyre.cell.engine_requests  # noqa: F401


async def _serve(settings: Any, parent: Parent) -> int:
    import uvicorn
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from gyre.cell.engine_control import KvCore, VllmControl
    from gyre.cell.engine_requests import Engine
    from gyre.cell.gate import Gate

    kv = kv_source(settings)
    words = server_flags(settings) + kv_flags(settings, kv)
    args = make_arg_parser(FlexibleArgumentParser(prog="engine.args")).parse_args(words)
    try:
        validate_parsed_serve_args(args)
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
    except (ValueError, TypeError) as error:
        raise UserError(f"vLLM refuses these settings: {' '.join(str(error).split())}") from error
    if not settings.gpus:
        # The CPU platform asks for spawned children, which would import everything once more. Here a fork is safe: this
        # process has not computed, and its only other thread waits for the supervisor.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        gc.freeze()  # collections in one of the two would copy the pages that they share
    sock = socket.create_server((settings.host, settings.port), backlog=1024)
    parent.say("progress", what="loading the model")
    engine = Engine.from_vllm_config(config, usage_context=UsageContext.OPENAI_API_SERVER)
    try:
        engine.by_token = bool(args.tool_call_parser or args.structured_outputs_config.reasoning_parser)
        await engine.reset_mm_cache()
        tasks = await engine.get_supported_tasks()
        app = build_app(args, tasks, engine.model_config)
        await init_app_state(engine, app.state, args, tasks)
        control = VllmControl(engine, settings)
        if kv is not None:
            kv.attach(KvCore(engine))
        gate = Gate(app, secret=settings.secret, rank=settings.rank, control=control, kv=kv)
        options = {"access_log": False, "log_level": "warning", "timeout_graceful_shutdown": 1}
        server = uvicorn.Server(uvicorn.Config(gate, timeout_keep_alive=300, **options))
        app.state.server = server  # vLLM's handlers of fatal errors stop it
        url = f"http://{settings.host}:{sock.getsockname()[1]}"
        words = {"url": url} | ({} if kv is None else {"kv": kv.address(url)})
        return await _run(server, sock, engine, parent, words)
    finally:
        if kv is not None:
            kv.close()
        engine.shutdown(timeout=SHUTDOWN_SECONDS if settings.gpus else 0)
        sock.close()


async def _run(server: Any, sock: socket.socket, engine: Any, parent: Parent, words: dict[str, str]) -> int:
    """Serve until SIGTERM, or until vLLM's core is dead; `words` are said when it can be reached."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def end(code: int) -> None:
        if not ended.done():
            ended.set_result(code)
        server.should_exit = True

    async def watch() -> None:
        while not server.should_exit:
            if server.started and not ready.is_set():
                ready.set()
                parent.say("ready", **words, pid=os.getpid())
            if engine.errored:
                log.error("vLLM's engine core is dead")
                end(EXIT_FAULT)
            await asyncio.sleep(0.02 if not ready.is_set() else 0.5)

    ready = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, EXIT_OK)
    server.capture_signals = _no_signals  # uvicorn's own handlers would replace these and send the signal again
    watching = loop.create_task(watch())
    await server.serve(sockets=[sock])
    watching.cancel()
    return ended.result() if ended.done() else EXIT_FAULT


class _NoSignals:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _no_signals() -> _NoSignals:
    return _NoSignals()


def run(settings: Any, parent: Parent) -> int:
    """Be the engine; returns the exit code."""
    import uvloop

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)  # until the server takes signals itself
    os.register_at_fork(after_in_child=die_with_parent)  # vLLM's core must not outlive this process
    try:
        return uvloop.run(_serve(settings, parent))
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_USER
    except KeyboardInterrupt:
        return EXIT_OK
    except SystemExit as error:  # the parser of the flags has said why
        return int(error.code or EXIT_OK)
    except Exception as error:
        log.exception("the engine failed")
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return EXIT_FAULT


def start(sock: socket.socket | None, line: str | None = None) -> int:
    """Be the engine whose settings come over `sock`, or are `line`; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from gyre.cell.engine_client import EngineSettings, environment

    parent = Parent(sock)
    settings = EngineSettings.decode(line if sock is None else parent.settings_line())
    parent.watch()
    for key, value in environment(settings).items():
        os.environ.setdefault(key, value)
    parent.say("progress", what="importing vLLM")
    load_libraries()
    return run(settings, parent)


def main() -> int:
    """Entry point."""
    descriptor = os.environ.pop("GYRE_CHILD_FD", None)
    if descriptor is None and len(sys.argv) != 2:
        print("usage: python -m gyre.cell.engine SETTINGS_JSON (or settings over the socket GYRE_CHILD_FD)")
        return EXIT_USER
    return start(socket.socket(fileno=int(descriptor))) if descriptor is not None else start(None, sys.argv[1])


def leave(code: int) -> None:
    """End this process without the interpreter's teardown, in which vLLM's libraries complain and take their time."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
