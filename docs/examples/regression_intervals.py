"""Prediction intervals of an ensemble regressor that hold for nine examples of ten.

Each member of `EnsembleRegressor(loss="gaussian")` predicts a mean and a noise, and
`predict(X, return_std=True)` returns the mean and the standard deviation of their
mixture. A standard deviation is no promise. Scores on held-out examples find the factor
that makes it one: intervals that hold as often as asked for, wide where the ensemble is
uncertain and narrow where it is not.

Run it with: python regression_intervals.py
"""

import numpy as np
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

from tdfunc import calibration
from tdfunc.sklearn import EnsembleRegressor


def main() -> None:
    """Fit on a third of the patients, calibrate on a third, count on a third."""
    X, y = load_diabetes(return_X_y=True)
    X, X_test, y, y_test = train_test_split(X, y, test_size=147, random_state=0)
    X, X_held, y, y_held = train_test_split(X, y, test_size=147, random_state=0)
    ensemble = EnsembleRegressor(
        loss="gaussian", n_estimators=16, max_iter=100, random_state=0
    )
    ensemble.fit(X, y)

    mean, std = ensemble.predict(X_held, return_std=True)
    scores = calibration.regression_scores(mean, y_held, scale=std)
    factor = calibration.conformal_threshold(scores, alpha=0.1)

    mean, std = ensemble.predict(X_test, return_std=True)
    plain = np.abs(y_test - mean) < 1.645 * std  # nine of ten of a normal distribution
    low, high = calibration.regression_intervals(mean, factor, scale=std)
    held = (low.numpy() < y_test) & (y_test < high.numpy())
    print(f"mean plus and minus 1.645 deviations: {plain.mean():.1%} of the patients")
    print(f"calibrated, {float(factor):.2f} deviations: {held.mean():.1%}")
    assert 0.82 < held.mean() < 0.98

    width = (high - low).numpy()
    print(f"the intervals are {width.min():.0f} to {width.max():.0f} wide")
    assert width.max() > 1.2 * width.min()


if __name__ == "__main__":
    main()
