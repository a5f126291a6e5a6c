"""An ensemble as a scikit-learn estimator, and its members as a tree.

`EnsembleClassifier` goes where scikit-learn's own estimators go: cross-validation, a
pipeline, a grid search. Its members train in one vmapped run, here with 16 learning
rates and early stopping. After `fit` they are a stacked tree, so the best of them is a
line, and so is a file that holds them all.

Run it with: python sklearn_estimators.py
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.model_selection import cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline

import tdfunc as tdf
from tdfunc import sweep
from tdfunc.sklearn import EnsembleClassifier

MEMBERS = 16


def main(folder: Path) -> None:
    """Cross-validate a pipeline, then look at the members of one fit."""
    X, y = load_digits(return_X_y=True)
    ensemble = EnsembleClassifier(
        n_estimators=MEMBERS,
        learning_rate=np.geomspace(1e-3, 1e-1, MEMBERS).tolist(),
        early_stopping=True,
        max_iter=30,
        random_state=0,
    )
    scores = cross_val_score(make_pipeline(PCA(32), ensemble), X, y, cv=3)
    print(f"accuracy of three folds: {scores.round(3).tolist()}")
    assert scores.mean() > 0.9

    X, X_test, y, y_test = train_test_split(X, y, test_size=500, random_state=0)
    ensemble.fit(X, y)
    doubt = ensemble.predict_uncertainty(X_test)["entropy"]
    wrong = ensemble.predict(X_test) != y_test
    among = wrong[np.argsort(doubt)[-50:]].sum()
    print(f"{among} of {wrong.sum()} errors are among the 50 images of most entropy")
    assert among > 0.5 * wrong.sum()

    # The members are rows of a tree; their losses on held-out examples rank them.
    tdf.save(ensemble.params_, folder / "members.safetensors")
    members = tdf.load(folder / "members.safetensors")
    losses = torch.as_tensor(ensemble.validation_loss_)
    rate = ensemble.learning_rate[int(sweep.rank(losses)[0])]
    best = sweep.best(members, losses)
    print(f"best learning rate {rate:.4f}; that member has {len(best.leaves())} leaves")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
