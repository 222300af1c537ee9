//! `recordings`: what a terminal shows of lily, as pictures for the README. The commands are run, nothing is made up.

use std::num::NonZeroU16;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use lily_svg::terminal::{Span, Style};

#[derive(clap::Args)]
pub struct Args {
    /// The program `lily`; by default a release build of this tree.
    #[arg(long)]
    lily: Option<PathBuf>,
}

/// A picture of commands, one after the other.
struct Recording {
    /// Of its file.
    name: &'static str,
    /// Width of the terminal in characters.
    columns: u16,
    /// As a user types them.
    commands: &'static [&'static str],
}

/// Where pictures lie.
const PLACE: &str = "docs/images";
const RECORDINGS: [Recording; 1] = [Recording {
    name: "run",
    columns: 110,
    commands: &[
        "lily run \"Tell me a story about a fox\" --no-think --seed 7",
        "lily run \"What is 48 + 27?\" --seed 7",
    ],
}];
/// Rows of the terminal: more than any recording has, so that nothing leaves it.
const ROWS: u16 = 200;

pub fn run(args: &Args) -> Result<()> {
    let lily = match &args.lily {
        Some(lily) => lily.clone(),
        None => crate::bench_peers::build_lily()?,
    };
    for recording in &RECORDINGS {
        let path = crate::root().join(PLACE).join(format!("{}.svg", recording.name));
        let rows = record(recording, &lily)?;
        let picture = lily_svg::terminal::svg(&recording.commands.join("; "), recording.columns.into(), &rows);
        std::fs::create_dir_all(crate::root().join(PLACE))?;
        std::fs::write(&path, picture).with_context(|| format!("cannot write {}", path.display()))?;
        println!("{}", path.display());
    }
    Ok(())
}

/// Runs the commands and gives the rows that the terminal shows in the end.
fn record(recording: &Recording, lily: &Path) -> Result<Vec<Vec<Span>>> {
    let sizes = NonZeroU16::new(ROWS).zip(NonZeroU16::new(recording.columns));
    let (rows, columns) = sizes.context("a terminal without rows or columns")?;
    let mut terminal = vt100::Parser::new(rows, columns, 0);
    for command in recording.commands {
        eprintln!("recordings: {command}");
        terminal.process(format!("\x1b[1m$ {command}\x1b[m\r\n").as_bytes());
        terminal.process(&shown(command, columns, lily)?);
        // Programs end their last line; where one does not, a prompt would follow it.
        if terminal.screen().cursor_position().1 > 0 {
            terminal.process(b"\r\n");
        }
    }
    let mut rows: Vec<Vec<Span>> = (0..ROWS).map(|row| spans(terminal.screen(), row, columns.get())).collect();
    while rows.last().is_some_and(|row| row.iter().all(|span| span.text.trim().is_empty())) {
        rows.pop();
    }
    Ok(rows)
}

/// What a command writes to a terminal. `script` gives it one.
fn shown(command: &str, columns: NonZeroU16, lily: &Path) -> Result<Vec<u8>> {
    let directory = lily.parent().context("the program lies nowhere")?.canonicalize()?;
    let home = tempfile::tempdir()?;
    let path = std::env::join_paths([directory, "/usr/bin".into(), "/bin".into()])?;
    let line = format!("stty columns {columns} rows {ROWS}; {command}");
    let output = Command::new("script")
        .args(["--quiet", "--return", "--command", &line, "/dev/null"])
        .env("PATH", path)
        .env("TERM", "xterm-256color")
        // Without the user's model and settings: the recording is what a stranger sees.
        .env("HOME", home.path())
        .env_remove("XDG_DATA_HOME")
        .stdin(Stdio::null())
        .output()
        .context("cannot run script, of util-linux")?;
    ensure!(output.status.success(), "{command} failed: {}", String::from_utf8_lossy(&output.stdout));
    Ok(output.stdout)
}

/// A row as text of one style after the other.
fn spans(screen: &vt100::Screen, row: u16, columns: u16) -> Vec<Span> {
    let mut spans: Vec<Span> = Vec::new();
    for cell in (0..columns).filter_map(|column| screen.cell(row, column)) {
        if cell.is_wide_continuation() {
            continue;
        }
        let colour = match cell.fgcolor() {
            vt100::Color::Idx(colour) => Some(colour),
            _ => None,
        };
        let style = Style { bold: cell.bold(), dim: cell.dim(), italic: cell.italic(), colour };
        let text = if cell.has_contents() { cell.contents() } else { " " };
        match spans.last_mut() {
            Some(last) if last.style == style => last.text.push_str(text),
            _ => spans.push(Span { text: text.into(), style }),
        }
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_program_writes_over_is_not_shown_and_styles_are_kept() {
        let recording = Recording {
            name: "test",
            columns: 40,
            commands: &["printf 'first\\rsecond\\n'; printf '\\033[2mdim\\033[0m plain \\033[32mgreen\\033[0m'"],
        };
        let rows = record(&recording, Path::new("/bin/sh")).unwrap();
        let text = |row: &[Span]| row.iter().map(|span| span.text.as_str()).collect::<String>().trim_end().to_owned();
        assert!(text(&rows[0]).starts_with("$ printf"), "{rows:?}");
        assert_eq!(
            rows[rows.len() - 2..].iter().map(|row| text(row)).collect::<Vec<_>>(),
            ["second", "dim plain green"]
        );
        let last = &rows[rows.len() - 1];
        let style = |word: &str| last.iter().find(|span| span.text.trim() == word).unwrap().style;
        assert_eq!((style("dim").dim, style("plain").dim, style("green").colour), (true, false, Some(2)));
        assert!(rows[0][0].style.bold);
    }

    #[test]
    fn a_command_that_fails_makes_no_picture() {
        let recording = Recording { name: "test", columns: 40, commands: &["false"] };
        assert!(record(&recording, Path::new("/bin/sh")).unwrap_err().to_string().contains("false failed"));
    }
}
