//! What a terminal showed, as rows of styled text.

use std::fmt::Write as _;

use crate::escaped;

/// Width of a character and height of a row, of a font of 13 pixels: every character gets a place of its own, so that columns stand
/// under each other in whatever monospaced font there is.
const CELL: (f64, f64) = (7.8, 18.0);
const FONT: f64 = 13.0;
/// Around the text, and above it.
const PADDING: f64 = 14.0;

/// Text of one style within a row.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    pub text: String,
    pub style: Style,
}

/// How text looks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Style {
    pub bold: bool,
    pub dim: bool,
    pub italic: bool,
    /// One of the sixteen colours of terminals.
    pub colour: Option<u8>,
}

/// Colours 0 to 15 on a light and on a dark page; each stands out from its background.
const COLOURS: [(&str, &str); 16] = [
    ("#24292f", "#8b949e"),
    ("#b3261e", "#ff8a80"),
    ("#1a7f37", "#7ee787"),
    ("#8a6100", "#e3b341"),
    ("#0959b3", "#79c0ff"),
    ("#7d3fb5", "#d2a8ff"),
    ("#12717d", "#76e3ea"),
    ("#57606a", "#d0d7de"),
    ("#57606a", "#8b949e"),
    ("#b3261e", "#ff8a80"),
    ("#1a7f37", "#7ee787"),
    ("#8a6100", "#e3b341"),
    ("#0959b3", "#79c0ff"),
    ("#7d3fb5", "#d2a8ff"),
    ("#12717d", "#76e3ea"),
    ("#24292f", "#f0f6fc"),
];

/// Draws rows of a terminal of `columns` characters; `title` is for readers of the page's text.
pub fn svg(title: &str, columns: usize, rows: &[Vec<Span>]) -> String {
    let (cell, height) = CELL;
    let (width, bottom) = (columns as f64 * cell + 2.0 * PADDING, rows.len() as f64 * height + 2.0 * PADDING);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {bottom:.0}\" \
         font-family=\"ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace\" font-size=\"{FONT}\">\n\
         <title>{}</title>\n<style>{}</style>\n\
         <rect x=\"0.5\" y=\"0.5\" width=\"{:.0}\" height=\"{:.0}\" rx=\"8\" class=\"page\"/>\n",
        escaped(title),
        style(rows),
        width - 1.0,
        bottom - 1.0
    );
    for (i, row) in rows.iter().enumerate() {
        let baseline = PADDING + height * i as f64 + FONT;
        let mut column = 0;
        for span in row {
            let length = span.text.chars().count();
            if !span.text.trim().is_empty() {
                text(&mut out, span, PADDING + cell * column as f64, baseline);
            }
            column += length;
        }
    }
    out.push_str("</svg>\n");
    out
}

fn text(out: &mut String, span: &Span, x: f64, y: f64) {
    let content = span.text.trim_end();
    let blanks = content.chars().take_while(|c| *c == ' ').count();
    let content = content.trim_start_matches(' ');
    let (x, length) = (x + CELL.0 * blanks as f64, CELL.0 * content.chars().count() as f64);
    let Style { bold, dim, italic, colour } = span.style;
    let set = [(bold, "b"), (dim, "d"), (italic, "i")].into_iter().filter(|(is, _)| *is);
    let mut classes: Vec<String> = set.map(|(_, class)| class.to_owned()).collect();
    classes.extend(colour.map(|colour| format!("c{}", colour % 16)));
    let class = match classes.is_empty() {
        true => String::new(),
        false => format!(" class=\"{}\"", classes.join(" ")),
    };
    let _ = writeln!(
        out,
        "<text xml:space=\"preserve\" x=\"{x:.1}\" y=\"{y:.1}\" textLength=\"{length:.1}\"{class}>{}</text>",
        escaped(content)
    );
}

/// The style sheet, with the colours that are used.
fn style(rows: &[Vec<Span>]) -> String {
    let used = |colour: &usize| rows.iter().flatten().any(|span| span.style.colour.map(usize::from) == Some(*colour));
    let colours: Vec<usize> = (0..COLOURS.len()).filter(used).collect();
    let list = |dark: bool| {
        colours.iter().fold(String::new(), |mut all, &i| {
            let _ = write!(all, ".c{i}{{fill:{}}}", if dark { COLOURS[i].1 } else { COLOURS[i].0 });
            all
        })
    };
    format!(
        ".page{{fill:#f6f8fa;stroke:#d0d7de}}text{{fill:#24292f}}.b{{font-weight:bold}}.d{{opacity:.7}}\
         .i{{font-style:italic}}{}@media(prefers-color-scheme:dark){{.page{{fill:#0d1117;stroke:#30363d}}\
         text{{fill:#e6edf3}}{}}}",
        list(false),
        list(true)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(text: &str, style: Style) -> Span {
        Span { text: text.into(), style }
    }

    #[test]
    fn characters_stand_in_their_columns() {
        let rows = [
            vec![
                span("ab  ", Style::default()),
                span("c<d", Style { colour: Some(2), bold: true, ..Style::default() }),
            ],
            vec![],
            vec![span("    x", Style { dim: true, ..Style::default() })],
        ];
        let image = svg("two & three", 20, &rows);
        let document = roxmltree::Document::parse(&image).unwrap();
        let place = |content: &str| {
            let node = document.descendants().find(|node| node.has_tag_name("text") && node.text() == Some(content));
            let node = node.unwrap_or_else(|| panic!("no {content} in {image}"));
            let number = |name| node.attribute(name).unwrap().parse::<f64>().unwrap();
            (number("x"), number("y"), node.attribute("class").unwrap_or_default().to_owned())
        };
        let (first, second, third) = (place("ab"), place("c<d"), place("x"));
        assert!((second.0 - first.0 - 4.0 * CELL.0).abs() < 0.11 && second.0 == third.0);
        assert!(first.1 == second.1 && (third.1 - first.1 - 2.0 * CELL.1).abs() < 0.11);
        assert_eq!((&*second.2, &*third.2), ("b c2", "d"));
        // A style for light and for dark pages of each colour in use, and of no other.
        assert_eq!((image.matches(".c2{").count(), image.matches(".c3{").count()), (2, 0));
    }
}
