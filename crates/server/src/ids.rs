//! Names for what APIs want named.

use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// `prefix` and 24 hexadecimal digits, different for each call: hashes of a counter under keys that the standard library
/// draws for its hash maps.
pub(crate) fn new(prefix: &str) -> String {
    static KEYS: LazyLock<[RandomState; 2]> = LazyLock::new(|| [RandomState::new(), RandomState::new()]);
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let count = COUNTER.fetch_add(1, Ordering::Relaxed);
    let [high, low] = [KEYS[0].hash_one(count), KEYS[1].hash_one(count)];
    format!("{prefix}{high:016x}{:08x}", low >> 32)
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    #[test]
    fn ids_differ() {
        let ids: BTreeSet<String> = (0..1000).map(|_| super::new("x_")).collect();
        assert_eq!(ids.len(), 1000);
        assert!(ids.iter().all(|id| id.len() == 26));
    }
}
