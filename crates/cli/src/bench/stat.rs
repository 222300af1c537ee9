//! One number over rounds.

use serde::{Deserialize, Serialize};

/// The median of an even number of rounds is the mean of the two in the middle.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stat {
    pub median: f64,
    pub min: f64,
    pub max: f64,
    /// In the order of measurement.
    pub rounds: Vec<f64>,
}

impl Stat {
    /// Of at least one round. Four digits behind the point are kept: records stay readable.
    pub fn of(rounds: impl IntoIterator<Item = f64>) -> Stat {
        let rounds: Vec<f64> = rounds.into_iter().map(|x| (x * 1e4).round() / 1e4).collect();
        let mut sorted = rounds.clone();
        sorted.sort_by(f64::total_cmp);
        let (low, high) = (sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
        Stat { median: (low + high) / 2.0, min: sorted[0], max: sorted[sorted.len() - 1], rounds }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_does_not_depend_on_order_and_ignores_outliers() {
        let stat = Stat::of([5.0, 1.0, 900.0]);
        assert_eq!((stat.median, stat.min, stat.max), (5.0, 1.0, 900.0));
        assert_eq!(stat.rounds, [5.0, 1.0, 900.0]);
        assert_eq!(Stat::of([4.0, 1.0, 3.0, 2.0]).median, 2.5);
        assert_eq!(Stat::of([7.0]).median, 7.0);
    }
}
