//! What the GPU may hold, what to do where that is too little, and what its failures mean.

use lily_backend::Error;

use crate::device::{Gpu, device_error};

/// What is kept free for activations and logits of steps when a context is chosen by memory.
const SPARE_BYTES: usize = 256 << 20;
/// What macOS and its programs need beside the GPU: with less left a Mac is of no use while lily runs.
const SYSTEM_BYTES: usize = 4 << 30;

/// Bytes of a state: so many for each token, and so many whatever their number.
#[derive(Clone, Copy)]
pub(crate) struct StateBytes {
    pub(crate) per_token: usize,
    pub(crate) whatever: usize,
}

impl StateBytes {
    /// Of a state of `tokens` tokens.
    pub(crate) fn of(self, tokens: usize) -> usize {
        tokens.saturating_mul(self.per_token).saturating_add(self.whatever)
    }

    /// The longest state in so many bytes.
    fn longest_in(self, bytes: usize) -> usize {
        bytes.saturating_sub(self.whatever) / self.per_token
    }
}

/// The longest context for what is left beside `used` bytes: at most `most`, and one that refuses to be made if there is room for none.
pub(crate) fn context(gpu: &dyn Gpu, used: usize, state: StateBytes, most: usize) -> usize {
    state.longest_in(gpu.memory_bytes().saturating_sub(used + SPARE_BYTES)).clamp(1, most)
}

/// Weights that do not fit; `room` bytes beside them would be of use.
pub(crate) fn no_room_for_weights(gpu: &dyn Gpu, needed: usize, room: usize) -> Error {
    let what = format!("the weights ({})", advice(gpu, needed + room));
    Error::OutOfMemory { what, needed, available: gpu.memory_bytes() }
}

/// A state that does not fit beside `used` bytes.
pub(crate) fn no_room_for_state(gpu: &dyn Gpu, used: usize, state: StateBytes, tokens: usize) -> Error {
    let needed = state.of(tokens);
    let available = gpu.memory_bytes().saturating_sub(used);
    let advice = advice(gpu, used.saturating_add(needed).saturating_add(SPARE_BYTES));
    let smaller = match state.longest_in(available.saturating_sub(SPARE_BYTES)) {
        0 => String::new(),
        fits => format!("a context of {fits} fits; "),
    };
    Error::OutOfMemory { what: format!("a context of {tokens} tokens ({smaller}{advice})"), needed, available }
}

/// How a GPU comes to hold `bytes`.
fn advice(gpu: &dyn Gpu, bytes: usize) -> String {
    match bytes.saturating_add(SYSTEM_BYTES) <= gpu.machine_bytes() {
        // What macOS lets a GPU hold is less than the memory; the user may allow it more.
        true => format!(
            "`sudo sysctl iogpu.wired_limit_mb={}` allows as much until the next start",
            bytes.div_ceil(1 << 20)
        ),
        false => "more than this Mac can give its GPU".into(),
    }
}

/// A failed command buffer, by the code of its error (`MTLCommandBufferError`) and what the system says of it.
pub(crate) fn failure(code: isize, words: &str) -> Error {
    const TIMEOUT: isize = 2;
    const PAGE_FAULT: isize = 3;
    const ACCESS_REVOKED: isize = 4;
    const OUT_OF_MEMORY: isize = 8;
    let meaning = match code {
        TIMEOUT => "it took longer than macOS allows; another program may have the GPU, else please report it",
        PAGE_FAULT => "a kernel left its memory, please report it",
        ACCESS_REVOKED => "macOS took the GPU away after an error, perhaps of another program; start again",
        OUT_OF_MEMORY => "there is too little memory: end other programs, or choose a smaller context with --ctx",
        _ => "please report it",
    };
    device_error(format!("a command buffer failed: {words} ({meaning})"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulated::Emulated;

    const GB: usize = 1 << 30;
    /// Of the full-size model with a BF16 cache.
    const STATE: StateBytes = StateBytes { per_token: 20 << 10, whatever: 64 << 20 };

    fn mac(gpu: usize, machine: usize) -> Emulated {
        let mut mac = Emulated::new(0);
        mac.memory = [gpu, machine];
        mac
    }

    #[test]
    fn weights_that_do_not_fit_name_the_limit_that_lets_them() {
        let error = no_room_for_weights(&mac(16 * GB, 24 * GB), 18 * GB + 1, GB).to_string();
        let expected = "the weights (`sudo sysctl iogpu.wired_limit_mb=19457` allows as much until the next start) needs \
                        19327352833 bytes, 17179869184 are available";
        assert_eq!(error, expected);
        // A Mac of 16 GB would be left with nothing.
        let error = no_room_for_weights(&mac(11 * GB, 16 * GB), 18 * GB, GB).to_string();
        assert!(error.starts_with("the weights (more than this Mac can give its GPU) needs"), "{error}");
    }

    #[test]
    fn a_context_that_does_not_fit_names_one_that_does_and_the_limit() {
        let gpu = mac(21 * GB, 32 * GB);
        let (used, tokens) = (19 * GB, 262_144);
        let error = no_room_for_state(&gpu, used, STATE, tokens).to_string();
        let fits = (2 * GB - SPARE_BYTES - STATE.whatever) / STATE.per_token;
        let megabytes = (used + STATE.of(tokens) + SPARE_BYTES) >> 20;
        let advice = format!("`sudo sysctl iogpu.wired_limit_mb={megabytes}` allows as much until the next start");
        assert!(
            error.starts_with(&format!("a context of 262144 tokens (a context of {fits} fits; {advice}) needs ")),
            "{error}"
        );
        // What is said to fit does, and is what is chosen.
        assert!(used + STATE.of(fits) + SPARE_BYTES <= gpu.memory_bytes());
        assert_eq!(context(&gpu, used, STATE, tokens), fits);
        assert_eq!(context(&gpu, 0, STATE, tokens), tokens);
        let error = no_room_for_state(&gpu, 21 * GB, STATE, tokens).to_string();
        assert!(error.starts_with("a context of 262144 tokens (`sudo"), "{error}");
        assert_eq!(context(&gpu, 21 * GB, STATE, tokens), 1);
    }

    #[test]
    fn a_failure_says_what_the_system_says_and_what_to_do() {
        let error = failure(8, "Insufficient Memory").to_string();
        assert!(error.contains("Insufficient Memory") && error.contains("--ctx"), "{error}");
        let meanings: std::collections::BTreeSet<String> = (0..9).map(|code| failure(code, "x").to_string()).collect();
        assert_eq!(meanings.len(), 5);
    }
}
