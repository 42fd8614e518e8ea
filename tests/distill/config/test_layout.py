"""What a path that a person gives stands for."""

from pathlib import Path

from distill.config.layout import CONFIG, STUDENT, best_student, find_student, list_steps, run_of, step_folder


def test_a_path_is_of_a_run_or_a_draft_or_neither(tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoint = step_folder(run, 7)
    for folder in (checkpoint / STUDENT, tmp_path / "model"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    assert run_of(run) is run_of(checkpoint) is None, "no config.yaml yet"
    (run / CONFIG).write_text("name: run\n")
    (run / "best").symlink_to(checkpoint, target_is_directory=True)
    assert run_of(run) == run
    assert run_of(checkpoint) == run.resolve()
    assert run_of(tmp_path / "model") is None
    assert find_student(str(run)) == str(best_student(run))
    assert find_student(str(checkpoint)) == str(checkpoint / STUDENT)
    assert find_student(str(tmp_path / "model")) == str(tmp_path / "model")
    assert find_student("hub/name") == "hub/name"


def test_only_whole_checkpoints_count(tmp_path: Path) -> None:
    for step, whole in ((20, True), (100, False), (3, True)):
        step_folder(tmp_path, step).mkdir(parents=True)
        if whole:
            (step_folder(tmp_path, step) / "progress.json").write_text("{}")
    assert list_steps(tmp_path) == [3, 20]
