# %% [markdown]
# # A small model learns to name a colour
#
# Two minutes on two CPU cores. Most editors open this file as a notebook; `python docs/examples/colour.py` runs it.

# %%
import json
import sys

import matplotlib
import pronk
from matplotlib import pyplot
from PIL import Image

settings = json.loads(sys.argv[1]) if len(sys.argv) > 1 and sys.argv[1].startswith("{") else {}

# %% [markdown]
# ## Train
#
# A recipe is the name of a shipped one, or a path. Its fields are set by their dotted names.

# %%
run = pronk.train("colour_tiny", settings)
print(run.folder, {name: run.result[name] for name in ("success_before", "success_after", "optimizer_steps")})

# %% [markdown]
# ## The curve

# %%
rows = [row for row in run.metrics() if "rollout/success" in row]  # run.metrics("pandas") is the same as a table
if "ipykernel" not in sys.modules:
    matplotlib.use("agg")
pyplot.plot([row["step"] for row in rows], [row["rollout/success"] for row in rows])
pyplot.xlabel("step")
pyplot.ylabel("success")
pyplot.savefig(run.folder / "success.png")

# %% [markdown]
# ## An episode: what the model was shown, and what it answered

# %%
episode = run.episodes()[-1]
print(episode["seen"][0])
print("answered:", episode["answers"][0], " reward:", episode["reward"])
picture = Image.open(episode["images"][0])
picture  # noqa: B018 - a notebook shows it

# %% [markdown]
# ## How sure is it?

# %%
measured = pronk.evaluate("colour_tiny", run.checkpoints[-1], settings, samples=32)
print(f"success {measured['success']:.2f}, 95 % interval {measured['low']:.2f} to {measured['high']:.2f}")
