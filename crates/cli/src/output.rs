//! Numbers and text for people.

use std::io::{IsTerminal, Write};

use indicatif::{ProgressBar, ProgressStyle};

/// A number of bytes in decimal units, like `19.5 GB`.
pub fn bytes(n: usize) -> String {
    const UNITS: [&str; 4] = ["kB", "MB", "GB", "TB"];
    if n < 1000 {
        return format!("{n} B");
    }
    let mut value = n as f64 / 1000.0;
    let mut unit = 0;
    while value >= 999.95 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// A count with its thousands set apart, like `262,144`.
pub fn grouped(n: usize) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A bar for work that takes long; invisible where stderr is no terminal.
pub fn progress(work: &str, unit: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(&format!("{work} {{bar:30}} {{pos}}/{{len}} {unit}, {{eta}} left"));
    let bar = ProgressBar::no_length();
    if let Ok(style) = style {
        bar.set_style(style);
    }
    bar
}

/// Writes thinking apart from the answer: dimmed on a terminal.
pub struct Dimmed<W> {
    to: W,
    styled: bool,
    open: bool,
}

impl<W: Write + IsTerminal> Dimmed<W> {
    /// Dims what goes to `to` if it is a terminal.
    pub fn new(to: W) -> Dimmed<W> {
        let styled = to.is_terminal();
        Dimmed { to, styled, open: false }
    }

    /// Writes a piece of thinking.
    pub fn write(&mut self, text: &str) -> std::io::Result<()> {
        if self.styled && !self.open {
            self.to.write_all(b"\x1b[2m")?;
        }
        self.open = true;
        self.to.write_all(text.as_bytes())?;
        self.to.flush()
    }

    /// Ends the thinking, if there was any: back to the normal style, on a new line.
    pub fn finish(&mut self) -> std::io::Result<()> {
        if !std::mem::take(&mut self.open) {
            return Ok(());
        }
        self.to.write_all(if self.styled { b"\x1b[0m\n\n" } else { b"\n\n" })?;
        self.to.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_decimal_with_one_digit() {
        assert_eq!(bytes(999), "999 B");
        assert_eq!(bytes(1000), "1.0 kB");
        assert_eq!(bytes(999_949), "999.9 kB");
        assert_eq!(bytes(999_950), "1.0 MB");
        assert_eq!(bytes(19_508_787_456), "19.5 GB");
    }

    #[test]
    fn counts_are_grouped_in_threes() {
        assert_eq!(grouped(7), "7");
        assert_eq!(grouped(262_144), "262,144");
        assert_eq!(grouped(1_000_000), "1,000,000");
    }
}
