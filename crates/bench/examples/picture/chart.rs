//! Memory over the steps of a load, as an SVG that reads well on light and dark pages.
//!
//! All arithmetic is in whole numbers, so the same figures give the same bytes everywhere.

use std::fmt::Write;

const GIB: u64 = 1 << 30;

const WIDTH: u64 = 800;
const HEIGHT: u64 = 440;
/// Edges of the plot.
const LEFT: u64 = 64;
const RIGHT: u64 = 784;
const TOP: u64 = 48;
const BOTTOM: u64 = 388;

const STYLE: &str = "\
text { font: 13px system-ui, sans-serif; fill: #57606a }
.title { font-size: 15px; font-weight: 600 }
.end { text-anchor: end }
.middle { text-anchor: middle }
.grid { stroke: #8b949e; stroke-opacity: 0.3 }
.axis { stroke: #8b949e }
.live { fill: #8b949e; fill-opacity: 0.4; stroke: none }
.ours, .peer { fill: none; stroke-width: 2; stroke-linejoin: round }
.ours { stroke: #0969da }
.peer { stroke: #d1570a }
@media (prefers-color-scheme: dark) {
  text { fill: #adbac7 }
  .ours { stroke: #539bf5 }
  .peer { stroke: #e0823d }
}";

/// What is drawn.
#[derive(Debug)]
pub(super) struct Chart {
    pub(super) title: String,
    /// What the horizontal axis counts.
    pub(super) steps: String,
    /// In the order of the legend; the last is drawn first.
    pub(super) series: [Series; 3],
}

/// One curve: a value after each step.
#[derive(Debug)]
pub(super) struct Series {
    /// `peer` and `ours` are lines, `live` is an area.
    pub(super) class: &'static str,
    pub(super) name: String,
    pub(super) bytes: Vec<u64>,
}

impl Chart {
    pub(super) fn svg(&self) -> String {
        let longest = self.series.iter().map(|series| series.bytes.len()).max().unwrap_or(0);
        let steps = u64::try_from(longest).unwrap_or(u64::MAX).max(1);
        let highest = self.series.iter().flat_map(|series| &series.bytes).max();
        let tick_gib = tick(highest.map_or(1, |bytes| bytes.div_ceil(GIB)));
        let highest_gib = highest.map_or(1, |bytes| (bytes / GIB + 1).next_multiple_of(tick_gib));
        let scale = Scale { steps, bytes: highest_gib * GIB };

        let mut svg = String::new();
        self.push(&mut svg, &scale, tick_gib);
        svg
    }

    fn push(&self, svg: &mut String, scale: &Scale, tick_gib: u64) {
        // Writing to a string does not fail.
        let mut line = |text: String| {
            let _ = writeln!(svg, "{text}");
        };
        let title = escaped(&self.title);
        line(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" \
             height=\"{HEIGHT}\" role=\"img\">"
        ));
        line(format!("<title>{title}</title>"));
        let names = self.series.iter().map(|series| escaped(&series.name)).collect::<Vec<_>>().join("; ");
        line(format!("<desc>{names}</desc>"));
        line(format!("<style>\n{STYLE}\n</style>"));
        line(format!("<text class=\"title\" x=\"{LEFT}\" y=\"24\">{title}</text>"));
        for gib in (0..=scale.bytes / GIB).step_by(usize::try_from(tick_gib).unwrap_or(usize::MAX)) {
            let y = scale.y(gib * GIB);
            let class = if gib == 0 { "axis" } else { "grid" };
            line(format!("<path class=\"{class}\" d=\"M{LEFT} {y}H{RIGHT}\"/>"));
            let unit = if gib == 0 { "" } else { " GiB" };
            let baseline = Tenths(y.0 + 45);
            line(format!("<text class=\"end\" x=\"{}\" y=\"{baseline}\">{gib}{unit}</text>", LEFT - 6));
        }
        let tick_steps = tick(scale.steps);
        for step in (0..=scale.steps).step_by(usize::try_from(tick_steps).unwrap_or(usize::MAX)) {
            let x = scale.x(step);
            line(format!("<path class=\"axis\" d=\"M{x} {BOTTOM}v5\"/>"));
            line(format!("<text class=\"middle\" x=\"{x}\" y=\"{}\">{step}</text>", BOTTOM + 20));
        }
        let (middle, below) = (u64::midpoint(LEFT, RIGHT), BOTTOM + 42);
        line(format!("<text class=\"middle\" x=\"{middle}\" y=\"{below}\">{}</text>", escaped(&self.steps)));
        for series in self.series.iter().rev() {
            line(format!("<path class=\"{}\" d=\"{}\"/>", series.class, scale.path(series)));
        }
        // The curves rise to the right, so the legend stands where they are low.
        for (row, series) in (0..).zip(&self.series) {
            let (x, y) = (LEFT + 14, TOP + 20 + 20 * row);
            let swatch = if series.class == "live" {
                format!("<rect class=\"live\" x=\"{x}\" y=\"{}\" width=\"24\" height=\"12\"/>", y - 10)
            } else {
                format!("<path class=\"{}\" d=\"M{x} {}h24\"/>", series.class, y - 4)
            };
            line(format!("{swatch}<text x=\"{}\" y=\"{y}\">{}</text>", x + 32, escaped(&series.name)));
        }
        line("</svg>".into());
    }
}

/// From figures to places.
struct Scale {
    steps: u64,
    bytes: u64,
}

impl Scale {
    fn x(&self, step: u64) -> Tenths {
        Tenths(LEFT * 10 + step * (RIGHT - LEFT) * 10 / self.steps)
    }

    fn y(&self, bytes: u64) -> Tenths {
        let height = u128::from(bytes) * u128::from((BOTTOM - TOP) * 10) / u128::from(self.bytes.max(1));
        Tenths((BOTTOM * 10).saturating_sub(u64::try_from(height).unwrap_or(u64::MAX)))
    }

    /// Stairs: a value holds from its step to the next. Corners only where it changes.
    fn path(&self, series: &Series) -> String {
        let mut path = format!("M{} {}", Tenths(LEFT * 10), self.y(0));
        let (mut at, mut end) = (self.y(0), 0);
        for (step, bytes) in (0..).zip(&series.bytes) {
            let y = self.y(*bytes);
            if y != at {
                let _ = write!(path, "H{}V{y}", self.x(step));
                at = y;
            }
            end = step + 1;
        }
        let _ = write!(path, "H{}", self.x(end));
        if series.class == "live" {
            let _ = write!(path, "V{}Z", self.y(0));
        }
        path
    }
}

/// A place in tenths of a pixel.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Tenths(u64);

impl std::fmt::Display for Tenths {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.0 / 10, self.0 % 10) {
            (whole, 0) => write!(f, "{whole}"),
            (whole, tenths) => write!(f, "{whole}.{tenths}"),
        }
    }
}

/// `96.21 GiB`.
pub(super) fn gib(bytes: u64) -> String {
    format!("{} GiB", hundredths(bytes, GIB))
}

/// `4.06×`.
pub(super) fn ratio(part: u64, whole: u64) -> String {
    format!("{}×", hundredths(part, whole))
}

fn hundredths(part: u64, whole: u64) -> String {
    let whole = u128::from(whole.max(1));
    let hundredths = (u128::from(part) * 100 + whole / 2) / whole;
    format!("{}.{:02}", hundredths / 100, hundredths % 100)
}

/// A round distance that cuts `extent` into eight pieces at most.
fn tick(extent: u64) -> u64 {
    let round = (0..18).flat_map(|power| [1, 2, 5].map(|digit| digit * 10_u64.pow(power)));
    round.into_iter().find(|tick| extent.div_ceil(*tick) <= 8).unwrap_or(extent.max(1))
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(bytes: [Vec<u64>; 3]) -> Chart {
        let mut bytes = bytes.into_iter();
        let series = ["peer", "ours", "live"].map(|class| Series {
            class,
            name: format!("{class} <&>"),
            bytes: bytes.next().unwrap(),
        });
        Chart { title: "A & B".into(), steps: "steps".into(), series }
    }

    /// Elements opened and closed in order, quoted attributes, no bare `&`.
    fn assert_well_formed(svg: &str) {
        let mut open = Vec::new();
        for (at, _) in svg.match_indices('<') {
            let tag = &svg[at + 1..];
            let tag = &tag[..tag.find('>').unwrap()];
            assert!(!tag.contains('<') && tag.matches('"').count().is_multiple_of(2), "{tag}");
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop(), Some(name));
            } else if !tag.ends_with('/') {
                open.push(tag.split(' ').next().unwrap());
            }
        }
        assert!(open.is_empty() && svg.starts_with("<svg ") && svg.ends_with("</svg>\n"), "{open:?}");
        for (at, _) in svg.match_indices('&') {
            assert!(["&amp;", "&lt;", "&gt;"].iter().any(|entity| svg[at..].starts_with(entity)));
        }
    }

    #[test]
    fn pictures_are_well_formed_and_the_same_each_time() {
        for bytes in [
            [vec![GIB, 5 * GIB, 90 * GIB], vec![GIB; 3], vec![GIB, 0, GIB]],
            [vec![], vec![], vec![]],
            [vec![0], vec![0], vec![0]],
            [vec![u64::MAX / 2], vec![1], vec![1]],
            [vec![3 * GIB; 10_000], vec![2 * GIB; 10_000], vec![GIB; 9_000]],
        ] {
            let svg = chart(bytes.clone()).svg();
            assert_well_formed(&svg);
            assert_eq!(svg, chart(bytes).svg());
            assert!(svg.contains("A &amp; B") && svg.contains("live &lt;&amp;&gt;"));
            assert!(svg.len() < 20_000, "{}", svg.len());
        }
    }

    #[test]
    fn curves_stay_in_the_plot_and_end_where_they_should() {
        let scale = Scale { steps: 4, bytes: 4 * GIB };
        let line = Series {
            class: "ours",
            name: String::new(),
            bytes: vec![GIB, GIB, 4 * GIB, 0].into_iter().collect(),
        };
        assert_eq!(scale.path(&line), "M64 388H64V303H424V48H604V388H784");
        let area = Series { class: "live", ..line };
        assert!(scale.path(&area).ends_with("H784V388Z"));
    }

    #[test]
    fn ticks_are_round_and_few() {
        for (extent, expected) in [(0, 1), (1, 1), (8, 1), (9, 2), (24, 5), (97, 20), (672, 100), (801, 200)]
        {
            assert_eq!(tick(extent), expected, "{extent}");
        }
    }

    #[test]
    fn figures_are_rounded_to_hundredths() {
        assert_eq!((gib(24_251 << 20), gib(0)), ("23.68 GiB".into(), "0.00 GiB".into()));
        assert_eq!((ratio(3, 2), ratio(1, 0)), ("1.50×".into(), "1.00×".into()));
    }
}
