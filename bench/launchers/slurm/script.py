"""From work and a site's options to the text of a job script. Pure: it reads the template and asks nothing else."""

import functools
import math
import re
import shlex
import sys
from pathlib import Path

import jinja2

import bench
from bench.core.errors import UserError
from bench.core.processes import build_module_command
from bench.core.scheduling import LaunchPlan, Work
from bench.launchers.slurm.options import Container, Options

SCRIPT = "job.sh"
_TEMPLATE = "job.sh.j2"
_PLAIN = re.compile(r"[\w@%+=:,./~-]+", re.ASCII)


def plan(work: Work, options: Options) -> LaunchPlan:
    """Return how `work` starts: a script in its folder and the `sbatch` that submits it. UserError for a folder that no
    job script can name."""
    folder = work.folder.absolute()
    _check(folder, options)
    path = folder / SCRIPT
    return LaunchPlan(("sbatch", "--parsable", str(path)), {}, folder, {path: _render(work, options, folder)})


def find_log(folder: Path, handle: str, task: int | None) -> Path:
    """Return the log of a job, or of a task of it."""
    return folder / (f"slurm-{handle}.log" if task is None else f"slurm-{handle}_{task}.log")


def find_template_folder() -> Path:
    """Return the folder of the template: beside the packages in a checkout, inside `bench` in a wheel."""
    package = Path(bench.__path__[0])
    inside = package / "slurm"
    return inside if inside.is_dir() else package.parent / "slurm"


def quote_directive(value: object) -> str:
    """Quote a value for an #SBATCH line. Those are read by sbatch, which knows quotes and backslashes and nothing else
    of a shell: `_get_argument` in its src/sbatch/opt.c, in these two the same since 2006."""
    text = str(value)
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return text if _PLAIN.fullmatch(text) else f'"{escaped}"'


def _check(folder: Path, options: Options) -> None:
    if "\\" in str(folder) or not str(folder).isprintable():
        rule = "Slurm cannot name a log in a folder with a backslash, a line break or an unreadable letter in its path"
        raise UserError(repr(str(folder)), rule, "choose another results folder")
    if not str(Path.cwd()).isprintable():
        raise UserError(repr(str(Path.cwd())), "a job script cannot name this folder", "start from another")
    if options.container and re.search("[,:]", str(folder)):
        rule = "a path with a colon or a comma cannot be mounted into a container"
        raise UserError(str(folder), rule, "choose another results folder")


@functools.cache
def load_template(file: Path) -> jinja2.Template:
    """Return the template of a script, with what quotes values for a shell and for sbatch; a name that it uses and
    nobody gives is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(file.parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"directive": quote_directive, "shell": lambda value: shlex.quote(str(value))}
    return environment.get_template(file.name)


def _render(work: Work, options: Options, folder: Path) -> str:
    small = work.devices_per_node == 0
    log = "slurm-%j.log" if work.tasks is None else "slurm-%A_%a.log"
    variables = dict(options.environment)
    if options.container and not small:
        variables["ZEROSCALE_CONTAINER_DIGEST"] = options.container.digest or options.container.image
    return load_template(find_template_folder() / _TEMPLATE).render(
        work=work,
        options=options,
        place=_select_place(options, small=small),
        script=folder / SCRIPT,
        log=f"{folder}/".replace("%", "%%") + log,
        directory=Path.cwd(),
        time_limit_min=_find_time_limit_min(work, options),
        small=small,
        nodes=1 if small else work.nodes,
        gpus=options.gpus and options.gpus.replace("{devices}", str(work.devices_per_node)),
        tasks_per_node=_count_tasks_per_node(work, options),
        cpus_per_task=_count_cpus_per_task(work, options),
        variables=variables,
        programs=None if options.python or options.container else Path(sys.executable).parent,
        command=_build_small_command(work, options) if small else _build_command(work, options, folder),
    )


def _select_place(options: Options, *, small: bool) -> dict[str, object]:
    """Return where and when a job is to run; the small one of the autopilot where its own options say so."""
    keys = ("partition", "account", "qos", "constraint", "reservation", "nice", "begin")
    place: dict[str, object] = {key: getattr(options, key) for key in keys}
    if not small:
        return place
    own = options.autopilot
    if own.partition is not None:
        place |= {"partition": own.partition, "constraint": None, "reservation": None}
    return place | {"qos": place["qos"] if own.qos is None else own.qos, "begin": own.begin}


def _find_time_limit_min(work: Work, options: Options) -> int | None:
    """Return the job's time limit; where only the attempt's is known, with time for the job to begin."""
    if work.time_limit_min is not None:
        return work.time_limit_min
    return None if options.time_limit_min is None else math.ceil(options.time_limit_min + options.setup_min)


def _count_tasks_per_node(work: Work, options: Options) -> int:
    return work.devices_per_node if options.span == "device" and work.devices_per_node else 1


def _count_cpus_per_task(work: Work, options: Options) -> int | None:
    if options.cpus_per_device is None or not work.devices_per_node:
        return None
    return options.cpus_per_device * work.devices_per_node // _count_tasks_per_node(work, options)


def _build_small_command(work: Work, options: Options) -> list[list[str]]:
    """Return what runs on one node without a device: in no container, since it asks Slurm, whose programs are outside,
    so with the Python that runs now."""
    python = options.python if options.python and not options.container else (sys.executable,)
    return [build_module_command(work.module, *work.arguments, python=python)]


def _build_command(work: Work, options: Options, folder: Path) -> list[list[str]]:
    """Return what runs on every node, in parts that are a line of the script each."""
    tasks, cpus = _count_tasks_per_node(work, options), _count_cpus_per_task(work, options)
    # --export: a site may have told sbatch to export nothing, and srun would obey too.
    # --cpus-per-task: since 22.05 srun does not take it over from sbatch.
    srun = ["srun", "--kill-on-bad-exit=1", "--export=ALL", f"--nodes={work.nodes}", f"--ntasks-per-node={tasks}"]
    srun += [f"--cpus-per-task={cpus}"] if cpus else []
    said = {option.partition("=")[0] for option in options.srun}  # by the site's file itself
    srun += [option for option in _list_bindings(options) if option.partition("=")[0] not in said]
    inside = _build_container_command(options.container, folder) if options.container else []
    python = options.python or (("python3",) if options.container else (sys.executable,))
    return [srun + list(options.srun), *inside, build_module_command(work.module, *work.arguments, python=python)]


def _list_bindings(options: Options) -> list[str]:
    """Return how processes are bound to what a node has of the job. One supervisor per node has all of it, since its
    ranks share that: what a cluster binds by itself, often to a single core, would be all that they get. A task per
    device keeps to its cores and to the memory beside them, and sees every device: a rank takes its own by number, and
    reaches its neighbours' directly."""
    sees_all = options.gpus is not None and "per-task" not in options.gpus
    devices = ["--gpu-bind=none"] if sees_all else []
    if options.span == "node":
        return ["--cpu-bind=none", *devices]
    return (["--cpu-bind=cores", "--mem-bind=local"] if options.cpus_per_device else []) + devices


def _build_container_command(container: Container, folder: Path) -> list[list[str]]:
    """Return what puts a command into a container that sees the study: its jobs, like its attempts, have their folders
    two levels below it."""
    study = str(folder.parent.parent)
    if container.runtime == "command":
        return [[word.replace("{study}", study).replace("{image}", container.image) for word in container.command]]
    if container.runtime == "apptainer":
        binds = [word for mount in (study, *container.mounts) for word in ("--bind", mount)]
        return [["apptainer", "exec", *container.options], binds, [container.image]]
    mounts = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in (study, *container.mounts))
    return [[f"--container-image={container.image}", f"--container-mounts={mounts}", *container.options]]
