"""Which cells are measured, with how many data: the whole benchmark and the quick one."""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.cell import Cell

LAPLACE, CURVLINOPS = ("laplace-torch",), ("curvlinops",)
EKFACS = ("ekfac", "ekfac-reduce", "ekfac-basis", "ekfac-1e-3")
FITS = ("diag", "diag-1e-3", "kron", "kron-1e-3", "kron-reduce", "kron-mc", *EKFACS)


def peers_of(name: str) -> tuple[str, ...]:
    """Who else can do an operation: nobody keeps to a tolerance, only curvlinops has EKFAC and reduces."""
    if name.endswith(("1e-3", "default", "basis")):
        return ()
    if "ekfac" in name:
        return CURVLINOPS if name in ("fit-ekfac", "fit-ekfac-mc") else ()
    if name.endswith("reduce"):
        return CURVLINOPS
    return (*LAPLACE, *CURVLINOPS) if name == "fit-kron-mc" else LAPLACE


def fits(workload: str, n: int, names: tuple[str, ...] = FITS, **options: int) -> Iterator[Cell]:
    for name in names:
        slow = options if name == "diag" else {}
        yield Cell(workload, f"fit-{name}", n, 1, peers_of(f"fit-{name}"), **slow)


def after(workload: str, n: int, m: int, names: tuple[str, ...], **options: int) -> Iterator[Cell]:
    """Operations on a fitted posterior."""
    for name in names:
        yield Cell(workload, name, n, m, peers_of(name), **options)


def served(workload: str, n: int, m: int) -> Iterator[Cell]:
    """Predictions of a posterior over all weights that cost few forward passes; no peer has them."""
    for name in ("distilled-kron", "ensemble-kron"):
        yield Cell(workload, name, n, m, ())


def whole() -> Iterator[Cell]:
    """Everything; hours rather than minutes where peers are slow."""
    yield from fits("mlp", 1024)
    yield from after("mlp", 1024, 64, ("predict-kron", "probs-kron", "samples-kron", "evidence-kron", "sweep-kron"))
    yield from fits("lenet", 1024, peer_n=64)
    yield from fits("lenet-last", 1024, ("full", "kron", "diag"))
    yield Cell("lenet", "fit-full", 1024, 1)
    yield from after("lenet", 1024, 50, ("predict-kron", "probs-kron"))
    yield from after("lenet", 1024, 50, ("predict-diag",), peer_n=64)
    yield from after("lenet", 1024, 16, ("samples-kron", "evidence-kron", "sweep-kron", "evidence-diag", "sweep-diag"))
    yield from fits("resnet20", 1024)  # of 50,000: what is paid once counts as little as it would there
    yield from fits("resnet20-frozen", 512)
    for name in ("resnet20", "resnet20-frozen"):
        yield from after(name, 128, 10, ("predict-kron", "probs-kron"))
        yield from after(name, 128, 16, ("samples-kron", "sweep-kron"))
    yield Cell("resnet20", "probs-kron-jvp", 128, 64, ())
    yield Cell("vit", "fit-diag", 128, 1, ())
    yield from fits("vit", 128, FITS[1:])
    yield from after("vit", 128, 16, ("predict-kron", "probs-kron"))
    yield from fits("llama", 128, ("diag-mc", "kron-mc", "ekfac-mc"))
    yield from after("llama", 128, 8, ("probs-kron-mc",))
    yield from fits("head", 256, ("diag", "kron", "kron-mc"))
    yield from after("head", 256, 64, ("predict-kron", "probs-kron", "sweep-kron"))
    yield from fits("resnet18", 64, ("diag", "kron-mc", "ekfac"))
    yield from after("resnet18", 64, 128, ("predict-ekfac", "probs-ekfac"))
    for m in (64, 1):
        for name in ("resnet20", "lenet"):
            yield from served(name, 128, m)


def quick() -> Iterator[Cell]:
    """The targets on small data, in ten minutes on two cores; peers where they tell something new."""
    krons = ("kron", "kron-reduce", "kron-default", "kron-1e-3", "kron-mc")
    short = ("diag", "diag-default", "diag-1e-3", *krons, *EKFACS)
    for cell in fits("lenet", 2048, short, peer_n=64):
        yield replace(cell, peer_n=512) if cell.peers and cell.peer_n is None else cell
    yield from after("lenet", 256, 50, ("predict-kron",))
    yield from after("lenet", 2048, 16, ("samples-kron", "evidence-kron", "sweep-kron"))
    yield from fits("mlp", 512, ("diag", "kron"))
    for cell in fits("resnet20", 256, short):  # as many as are timed after a run to warm up
        if cell.operation.endswith(("1e-3", "mc", "default")):  # so fast that what is paid once would count
            yield replace(cell, n=1024, peers=())
        elif cell.operation.startswith("fit-kron"):
            yield replace(cell, n=512, peers=cell.peers if cell.operation == "fit-kron" else ())
        else:
            yield cell if cell.operation == "fit-diag" else replace(cell, peers=())
    yield from fits("resnet20-frozen", 256, ("kron",))
    yield from after("resnet20-frozen", 64, 8, ("predict-kron",))
    yield Cell("resnet20", "probs-kron", 64, 8, ())
    yield Cell("resnet20", "probs-kron-jvp", 64, 64, ())
    yield Cell("vit", "fit-diag", 64, 1, ())  # laplace-torch was killed for its memory
    yield from fits("vit", 64, ("kron", "kron-mc"))
    yield Cell("vit", "predict-kron", 64, 8, ())
    yield Cell("llama", "fit-diag-mc", 32, 1)
    yield Cell("llama", "fit-kron-mc", 32, 1)
    yield Cell("head", "fit-kron-mc", 64, 1)
    yield from after("head", 64, 64, ("predict-kron-mc", "probs-kron-mc"))
    for name in ("resnet20", "lenet"):
        yield from served(name, 64, 64)


def growth(quick: bool) -> Iterator[tuple[str, float, Cell]]:
    """(axis, size, cell): time and memory against the number of data, and against the width of an MLP."""
    sizes = (128, 512, 2048) if quick else (128, 256, 512, 1024, 2048, 4096)
    widths = (64, 256, 1024) if quick else (64, 128, 256, 512, 1024)
    for name in ("fit-kron", "fit-diag"):
        for n in sizes:
            yield "N", n, Cell("lenet", name, n, 1, LAPLACE if name == "fit-kron" else (), inner=2)
        for width in widths:
            workload = "mlp" if width == 1024 else f"mlp{width}"
            yield "width", width, Cell(workload, name, 512, 1, LAPLACE if name == "fit-kron" else (), inner=2)
