"""Nothing in the package executes the content of a file: no unpickling, no evaluation, no shell."""

import ast

import pytest

from tests.support.places import trees

BANNED_IMPORTS = {
    "cloudpickle",
    "dill",
    "joblib",
    "jsonpickle",
    "marshal",
    "pickle",
    "shelve",
    "jax.experimental.serialize_executable",
}
BANNED_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "torch.load",
    "pandas.read_pickle",
}
YAML_LOADERS = {"load", "load_all", "unsafe_load", "full_load", "unsafe_load_all", "full_load_all"}
NUMPY = {"np", "numpy"}


def dotted(node):
    """`a.b.c` of a name or attribute; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def keyword(call, name):
    return next((k.value for k in call.keywords if k.arg == name), None)


def is_constant(node, value):
    return isinstance(node, ast.Constant) and node.value is value


def offence(node):
    """The problem with one node of a syntax tree; "" if there is none."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        names += [f"{names[0]}.{a.name}" for a in node.names if isinstance(node, ast.ImportFrom)]
        return next(
            (f"imports {n}" for n in names if n in BANNED_IMPORTS or n.split(".")[0] in BANNED_IMPORTS), ""
        )
    if not isinstance(node, ast.Call):
        return ""
    name = dotted(node.func)
    owner, _, last = name.rpartition(".")
    if name in BANNED_CALLS or (owner == "yaml" and last in YAML_LOADERS):
        return f"calls {name}"
    allowed = keyword(node, "allow_pickle")
    if (allowed or (owner in NUMPY and last == "load")) and not is_constant(allowed, False):
        return f"calls {name} without allow_pickle=False"
    shell = keyword(node, "shell")
    return "starts a shell" if shell is not None and not is_constant(shell, False) else ""


def offences(tree, name="text"):
    return [f"{name}:{n.lineno} {what}" for n in ast.walk(tree) if (what := offence(n))]


def test_the_package_is_clean():
    assert len(trees()) > 100
    assert [line for name, tree in trees().items() for line in offences(tree, name)] == []


CLEAN = ["model.eval()", "np.load(path, allow_pickle=False)", "yaml.safe_load(text)", "re.compile('a')"]


@pytest.mark.parametrize(
    "text",
    [
        *CLEAN,
        "import pickle",
        "from pickle import loads",
        "import cloudpickle as c",
        "from jax.experimental import serialize_executable",
        "eval('1')",
        "exec(text)",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "numpy.load(path, allow_pickle=flag)",
        "read_array(file, allow_pickle=True)",
        "torch.load(path, weights_only=True)",
        "subprocess.run(line, shell=True)",
        "os.system('ls')",
    ],
)
def test_the_lint_sees_them_and_leaves_the_rest_alone(text):
    assert len(offences(ast.parse(text))) == (text not in CLEAN)
