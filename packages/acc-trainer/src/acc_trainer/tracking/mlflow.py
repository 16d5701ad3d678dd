"""MLflow."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from acc_ops.environment import parse_choice_from_env, parse_flag_from_env
from acc_ops.optional import is_mlflow_available, require
from acc_trainer.tracking.tracker import GeneralTracker, on_main_process
from acc_trainer.tracking.values import flat, is_number, spread, table_rows


class MLflowTracker(GeneralTracker):
    """A run of the experiment `experiment_name`; artifacts of a new experiment go to `logging_dir`.

    `tags` may be a dict or its JSON text. MLFLOW_EXPERIMENT_NAME, MLFLOW_TAGS (JSON), MLFLOW_RUN_ID and MLFLOW_NESTED_RUN win over the
    arguments. Raises `ValueError` for tags that are no JSON object, `ImportError` without mlflow.
    """

    name = "mlflow"
    requires_logging_directory = False
    library_available = staticmethod(is_mlflow_available)

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__()
        self.experiment_name = parse_choice_from_env("MLFLOW_EXPERIMENT_NAME", "") or experiment_name
        self.logging_dir = None if logging_dir is None else os.fspath(logging_dir)
        self.run_id = parse_choice_from_env("MLFLOW_RUN_ID", "") or run_id
        self.tags = _tags(parse_choice_from_env("MLFLOW_TAGS", "") or tags)
        self.nested_run = parse_flag_from_env("MLFLOW_NESTED_RUN", bool(nested_run))
        self.run_name = run_name
        self.description = description
        self.active_run: Any = None
        self._client: Any = None

    @property
    def tracker(self) -> Any:
        """MLflow's active run."""
        return self.active_run

    @on_main_process
    def start(self) -> None:
        """Begin or resume the run, in the experiment of that name, which is made if there is none."""
        mlflow = _mlflow()
        self._client = mlflow.MlflowClient()
        self.active_run = mlflow.start_run(
            run_id=self.run_id,
            experiment_id=None if self.experiment_name is None else self._experiment(),
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    def _experiment(self) -> str:
        known = self._client.get_experiment_by_name(self.experiment_name)
        if known is None:
            made = self._client.create_experiment(self.experiment_name, artifact_location=self.logging_dir)
            return str(made)
        return str(known.experiment_id)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The settings as parameters, nested ones as `optimizer.lr`; one whose text is longer than MLflow allows is left out."""
        limits = require("mlflow.utils.validation", "the MLflow tracker")
        longest = limits.MAX_PARAM_VAL_LENGTH
        fit = {}
        for key, value in flat(values).items():
            if longest is not None and len(str(value)) > longest:
                self.leave_out(key, f"its {len(str(value))} characters are more than MLflow's {longest}")
            else:
                fit[key] = value
        param = require("mlflow.entities", "the MLflow tracker").Param
        made = [param(key, str(value)) for key, value in fit.items()]
        for at in range(0, len(made), limits.MAX_PARAMS_TAGS_PER_BATCH):
            batch = made[at : at + limits.MAX_PARAMS_TAGS_PER_BATCH]
            self._client.log_batch(self._run_id, params=batch)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as metrics; without a step they count as step 0, as in MLflow. Keyword arguments go to `MlflowClient.log_batch`."""
        metric = require("mlflow.entities", "the MLflow tracker").Metric
        now_ms = int(time.time() * 1000)
        made = []
        for key, value in spread(values).items():
            if is_number(value):
                made.append(metric(key, float(value), now_ms, step or 0))
            else:
                self.leave_out(key, f"it shows numbers, got {type(value).__name__}")
        if made:
            self._client.log_batch(self._run_id, metrics=made, **kwargs)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """A matplotlib or plotly figure as the artifact `artifact_file`."""
        self._client.log_figure(self._run_id, figure, artifact_file, save_kwargs=save_kwargs or None)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,  # noqa: ARG002  MLflow's tables have no step
    ) -> None:
        """A table given as columns and rows, or as a dataframe, as the artifact `table_name`.json; rows are added to an earlier one."""
        shown = dataframe
        if dataframe is None:
            headers, rows = table_rows(columns, data, None)
            names = headers or [str(number) for number in range(len(rows[0]) if rows else 0)]
            shown = {name: [row[at] for row in rows] for at, name in enumerate(names)}
        self._client.log_table(self._run_id, shown, f"{table_name.removesuffix('.json')}.json")

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """A file, into the folder `artifact_path` of the artifacts."""
        self._client.log_artifact(self._run_id, local_path, artifact_path)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """All files of a folder, into the folder `artifact_path` of the artifacts."""
        self._client.log_artifacts(self._run_id, local_dir, artifact_path)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        if self.active_run is None:
            return
        mlflow, run_id = _mlflow(), self._run_id
        self.active_run = None
        active = mlflow.active_run()
        if active is not None and active.info.run_id == run_id:
            mlflow.end_run()
        else:  # finished in another thread than it began in
            self._client.set_terminated(run_id)

    @property
    def _run_id(self) -> str:
        return str(self.active_run.info.run_id)


def _tags(tags: dict[str, Any] | str | None) -> dict[str, Any] | None:
    if not isinstance(tags, str):
        return tags
    try:
        made = json.loads(tags)
    except json.JSONDecodeError as error:
        raise ValueError(f"MLflow's tags must be a JSON object, got {tags!r}: {error}") from error
    if not isinstance(made, dict):
        raise ValueError(f"MLflow's tags must be a JSON object, got {tags!r}")
    return made


def _mlflow() -> Any:
    return require("mlflow", "the MLflow tracker", extra="acc-trainer[mlflow]")
