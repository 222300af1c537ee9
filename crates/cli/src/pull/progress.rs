//! What `pull` shows on stderr: bars on a terminal, else a line now and then.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use indicatif::{DecimalBytes, MultiProgress, ProgressBar, ProgressStyle};

/// Without a terminal a line is written each time that this much more of the whole is done.
const PLAIN_STEP_PERCENT: u64 = 5;

/// A bar for the whole and one for each file at work.
pub struct Progress {
    /// `None` without a terminal.
    bars: Option<MultiProgress>,
    total: ProgressBar,
    next_percent: AtomicU64,
}

impl Progress {
    /// `total_bytes`: the size of all files that are not known to be right.
    pub fn new(total_bytes: u64) -> Self {
        let bars = io::stderr().is_terminal().then(MultiProgress::new);
        let total = ProgressBar::hidden();
        total.set_length(total_bytes);
        let total = match &bars {
            Some(bars) => {
                let style = style(
                    "total {wide_bar} {decimal_bytes} of {decimal_total_bytes}, {decimal_bytes_per_sec}, {eta} left",
                );
                let total = bars.add(total.with_style(style));
                // The time left is redrawn also while nothing arrives.
                total.enable_steady_tick(Duration::from_secs(1));
                total
            }
            None => total,
        };
        Self { bars, total, next_percent: AtomicU64::new(PLAIN_STEP_PERCENT) }
    }

    /// A bar for one file; dropping it takes it off the screen.
    pub fn file(&self, name: &str, size_bytes: u64) -> FileProgress<'_> {
        let bar = ProgressBar::hidden();
        bar.set_length(size_bytes);
        let bar = match &self.bars {
            Some(bars) => {
                let style = style("{msg:33} {wide_bar} {decimal_bytes:>9} of {decimal_total_bytes:>9}");
                bars.insert_before(&self.total, bar.with_style(style).with_message(name.to_owned()))
            }
            None => bar,
        };
        FileProgress { whole: self, bar }
    }

    /// Writes one line above the bars.
    pub fn note(&self, line: &str) {
        // A closed stderr is no reason to stop a download.
        let _ = match &self.bars {
            Some(bars) => bars.println(line),
            None => writeln!(io::stderr(), "{line}"),
        };
    }

    fn add(&self, bytes: u64) {
        self.total.inc(bytes);
        let (done, all) = (self.total.position(), self.total.length().unwrap_or(0));
        let percent = done.saturating_mul(100) / all.max(1);
        let next = self.next_percent.load(Ordering::Relaxed);
        if self.bars.is_none() && percent >= next && percent < 100 {
            // Two threads may pass the same mark; the one that moves it writes the line.
            let after = percent - percent % PLAIN_STEP_PERCENT + PLAIN_STEP_PERCENT;
            if self.next_percent.compare_exchange(next, after, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                self.note(&format!("{percent}%: {} of {}", DecimalBytes(done), DecimalBytes(all)));
            }
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.total.finish_and_clear();
    }
}

/// The share of one file in a [`Progress`].
pub struct FileProgress<'a> {
    whole: &'a Progress,
    bar: ProgressBar,
}

impl FileProgress<'_> {
    /// `bytes` more of the file are hashed or downloaded.
    pub fn add(&self, bytes: u64) {
        self.bar.inc(bytes);
        self.whole.add(bytes);
    }

    /// The file starts again from its first byte.
    pub fn restart(&self) {
        self.whole.total.dec(self.bar.position());
        self.bar.set_position(0);
    }

    /// Writes one line above the bars.
    pub fn note(&self, line: &str) {
        self.whole.note(line);
    }
}

impl Drop for FileProgress<'_> {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

fn style(template: &str) -> ProgressStyle {
    // The templates are constants of this file; a plain bar is the harmless answer to a typo in them.
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("━╸─")
}
