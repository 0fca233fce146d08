"""`cyxjax predict|evaluate|export RUN`: uses the trained model of a run folder."""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cyxjax.command import Parser, number
from cyxjax.errors import EXIT_OK, ConfigError

_TO = ("safetensors", "hf", "stablehlo", "onnx")
_TABLES = (".npy", ".npz", ".csv")


def evaluate(argv: Sequence[str]) -> int:
    """`cyxjax evaluate RUN`: prints the metrics of the run's model on its own or other samples."""
    parser = _parser("evaluate", "Evaluates a run's model on its own samples, or others in the same format.")
    parser.add_argument("--part", choices=("train", "val", "test"), default="test", help="which samples")
    parser.add_argument("--root", help="file or folder to read samples from instead of the run's data.root")
    parser.add_argument("--max-batches", type=number(1, 10**9), help="stop after this many batches")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = _parsed(parser, argv)

    with _stored_run(given) as run:
        from cyxjax.core.metrics import numbers
        from cyxjax.observe.records import plain_tree
        from cyxjax.train.experiment import data_of
        from cyxjax.train.feeding.fit_data import is_loader
        from cyxjax.train.runs.tables import check_columns, check_names, check_vocabulary

        if given.root is None:
            splits = run.data
        else:
            data = run.config.data.model_copy(update={"root": given.root})
            splits = data_of(run.config.model_copy(update={"data": data}))
            check_columns(given.root, splits.info.column_names, run.info.column_names)
            check_names(given.root, "classes", splits.info.class_names, run.info.class_names)
            check_vocabulary(given.root, splits.info.vocabulary, run.info.vocabulary)
        samples = getattr(splits, given.part)
        count = None if is_loader(samples) else len(samples)  # of a stream it is not known
        found = run.trainer.evaluate_metrics(
            samples, batch_size=given.batch_size, max_batches=given.max_batches
        )
        known = {n: value for n, value in numbers(found).items() if n == "loss" or not math.isnan(value)}
        if given.json:
            tables = {name: value.tolist() for name, value in found.items() if name not in numbers(found)}
            about = {"step": run.step, "part": given.part}
            about |= {} if given.max_batches or count is None else {"samples": count}
            text = json.dumps(plain_tree(about | known | tables), allow_nan=False)
        else:
            shown = ", ".join(f"{name} {value:.4f}" for name, value in known.items())
            of = "a stream" if count is None else f"{count} samples"
            of = f"at most {given.max_batches} batches of {of}" if given.max_batches else of
            text = f"step {run.step}, {given.part}, {of}: {shown}"
        _print(run, text)

    return EXIT_OK


def predict(argv: Sequence[str]) -> int:
    """`cyxjax predict RUN INPUT OUTPUT`: writes the model's outputs, one row for each row of INPUT."""
    parser = _parser(
        "predict",
        "Writes the outputs of a run's model, one row for each row of the input.",
        " x.npy scores.csv",
    )
    parser.add_argument(
        "input", type=Path, help=".npy; .npz with x, or with one array per input, by name; .csv"
    )
    parser.add_argument(
        "output", type=Path, help=".npy, .npz (several outputs) or .csv; overwritten if it exists"
    )
    given = _parsed(parser, argv)
    for path in (given.input, given.output):
        if path.suffix not in _TABLES:
            raise ConfigError(
                f"{path}: expected a name that ends in {', '.join(_TABLES)}. HINT: np.save('x.npy', x)."
            )
    if not given.input.is_file():
        raise ConfigError(f"{given.input}: no such file. HINT: np.save(file, x) writes one.")
    written, read = [path.absolute().parent.resolve() / path.name for path in (given.output, given.input)]
    if written in (read, read.resolve()):  # a link is replaced by the new file, not followed
        raise ConfigError(
            f"{given.output}: that is the input, which would be overwritten. HINT: name another file."
        )

    with _stored_run(given) as run:
        from cyxjax.train.runs import tables

        inputs = tables.read_inputs(given.input, run.trainer.plan.inputs, run.info.column_names)
        outputs = run.predict(inputs, batch_size=given.batch_size)
        if run.trainer.is_master():
            text = tables.write_outputs(given.output, outputs, run.info)
            _print(run, f"step {run.step}: {text} -> {given.output}")

    return EXIT_OK


def export(argv: Sequence[str]) -> int:
    """`cyxjax export RUN FILE --to FORMAT`: the trained model as a file for other programs."""
    parser = _parser("export", "Writes a run's model for other programs.", " digits.safetensors")
    parser.add_argument(
        "file", type=Path, help="the file to write, overwritten if it exists; for hf a new folder"
    )
    parser.add_argument(
        "--to",
        choices=_TO,
        default="safetensors",
        help="safetensors: parameters, with the configuration in the header; hf: a folder with config.json "
        "and model.safetensors, by the names of init_from.map or torch's; stablehlo: a program that needs "
        "neither cyxjax nor the model's code, for any number of rows, or --batch-size; onnx: the same for "
        "ONNX runtimes (pip install 'cyxjax[onnx]')",
    )
    parser.add_argument("--platforms", help="stablehlo: additional platforms, such as cuda,tpu")
    given = _parsed(parser, argv)
    if given.to == "hf" and given.file.exists():
        raise ConfigError(f"{given.file} already exists. HINT: name a new folder.")

    with _stored_run(given) as run:
        from cyxjax.train.runs import run as stored_run

        platforms = given.platforms.split(",") if given.platforms else ()
        if given.to in ("stablehlo", "onnx"):
            text = stored_run.to_program(run, given.file, given.to, given.batch_size, platforms)
        elif given.to == "hf":
            text = stored_run.to_hf(run, given.file)
        else:
            text = stored_run.to_safetensors(run, given.file)
        _print(run, f"step {run.step}: {text} -> {given.file}")

    return EXIT_OK


def _parser(name: str, text: str, example: str = "") -> Parser:
    parser = Parser(
        prog=f"cyxjax {name}", description=text, epilog=f"example: cyxjax {name} runs/digits{example}"
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument(
        "--step", type=number(0, 10**9), help="step of the checkpoint; default: the newest that verifies"
    )
    parser.add_argument(
        "--batch-size", type=number(1, 10**9), help="samples per device and batch; default: the run's"
    )
    return parser


def _parsed(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    given = parser.parse_args(argv)
    written = getattr(given, "file", None) or getattr(given, "output", None)
    if written and not written.absolute().parent.is_dir():
        raise ConfigError(f"{written}: its folder does not exist. HINT: create it first.")
    return given


@contextmanager
def _stored_run(given: argparse.Namespace) -> Iterator[Any]:
    """The named run, in the process group of the environment, which is left at the end."""
    from cyxjax.train.runs.run import load_run, stored_config

    stored_config(given.run)  # fails for a wrong folder before jax starts
    from cyxjax.distributed import process_group

    yield load_run(given.run, given.step)
    process_group.finalize()


def _print(run: Any, text: str) -> None:
    if run.trainer.is_master():
        print(text)
