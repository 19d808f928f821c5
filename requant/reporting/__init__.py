"""What a run says about itself: one page, its plots, and text before and after.

| file | what |
| --- | --- |
| `report.py` | `report.html` and `report.json` of a checkpoint |
| `pages.py` | templates to pages that need no network |
| `plots.py` | the plots, as SVG |
| `samples.py` | what the model writes before and after |
| `lineup.py` | checkpoints side by side |
"""
