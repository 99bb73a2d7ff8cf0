"""`TrainResult`: the result of a training run, read from its run folder. In a notebook it shows the summary and the report."""

from dataclasses import dataclass
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

from ..config import Config
from ..terminal import PLAIN_WIDTH, Terminal
from .run_folder import RunFolder
from .summary import summary_table

REPORT_HEIGHT_PX = 640


@dataclass(frozen=True)
class TrainResult:
    """Result of a training run, read from its run folder."""

    config: Config
    """Configuration of the run."""
    finished: bool
    """True if the run reached its last step; False if it was stopped before and can be resumed."""

    @property
    def path(self) -> Path:
        """Run folder. For a run on shared storage, its local working copy."""
        return self._folder.path

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Metrics of each step, with the key `step`. Step 0 is the evaluation before training."""
        return self._folder.read_metrics()

    @property
    def report(self) -> Path:
        """Report in HTML."""
        return self.path / "report.html"

    @property
    def model(self) -> Path:
        """Trained model, for `load_model` or transformers. A run that is not finished has none."""
        return self._folder.model

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """Return the stored rollouts of a step: prompt, text, reward, log-probs and more, by column name."""
        import pyarrow.parquet as pq

        return pq.read_table(self._folder.rollouts / f"step-{step}.parquet").to_pylist()

    def push_to_hub(self, repo: str, *, step: int | str | None = None, merge: bool = False, private: bool = False) -> str:
        """Upload the model, or the adapter, to a repository of the hub with a model card, and return its address.

        `step` is a step number, "best", or None for the last checkpoint. `merge` merges the adapter into the weights.
        """
        from .export import export

        url = export(self.config.run_dir, None, step=step, merge=merge, push=repo, private=private)
        assert url is not None
        return url

    @property
    def _folder(self) -> RunFolder:
        return RunFolder(self.config.run_dir, writes=False)

    def _repr_html_(self) -> str:
        console = Terminal(record=True, file=StringIO(), width=PLAIN_WIDTH, highlight=False, force_jupyter=False)
        console.print(summary_table([self.config], [self.metrics]))
        table = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
        if not self.report.exists():
            return table
        report = escape(self.report.read_text(encoding="utf-8"))
        style = f"width: 100%; height: {REPORT_HEIGHT_PX}px; border: 0"
        return f'{table}<iframe sandbox="allow-scripts" style="{style}" srcdoc="{report}"></iframe>'
