//! The chart as an SVG for documents, that reads well on light and dark pages.
//!
//! All arithmetic is in whole numbers, so the same figures give the same bytes everywhere.

use std::fmt::Write;

use super::curves;
use super::looks::{ceiling, escaped, looks};
use crate::replay::Run;
use crate::trace::Trace;

/// Edges around the plot.
const LEFT: u64 = 64;
const RIGHT: u64 = 16;
const TOP: u64 = 58;
const BELOW: u64 = 52;
const LEGEND_ROW: u64 = 20;
/// Below these, nothing could be read.
const WIDTH_MIN: u32 = 320;
const HEIGHT_MIN: u32 = 200;
/// What a letter takes, about and at most.
const LETTER: u64 = 7;
const LEGEND_LETTER: u64 = 8;
const SWATCH: u64 = 34;

const STYLE: &str = "\
text { font: 13px system-ui, sans-serif; fill: #57606a }
.title { font-size: 15px; font-weight: 600 }
.end { text-anchor: end }
.middle { text-anchor: middle }
.grid { stroke: #8b949e; stroke-opacity: 0.3 }
.axis { stroke: #8b949e }
.band { fill: #8b949e; fill-opacity: 0.1 }
.live { fill: #8b949e; fill-opacity: 0.4; stroke: none }
.usable { stroke: #cf222e; stroke-dasharray: 2 3 }
.failure { fill: none; stroke: #cf222e; stroke-width: 2.5 }
.l0, .l1, .l2, .l3, .l4, .l5, .l6, .l7 { fill: none; stroke-width: 2; stroke-linejoin: round }
.l0 { stroke: #0969da; stroke-width: 2.5 }
.l1 { stroke: #d1570a }
.l2 { stroke: #8250df; stroke-dasharray: 8 3 }
.l3 { stroke: #bf3989; stroke-dasharray: 3 3 }
.l4 { stroke: #4d7c0f; stroke-dasharray: 10 3 2 3 }
.l5 { stroke: #0e7490; stroke-dasharray: 5 2 }
.l6 { stroke: #9a6700; stroke-dasharray: 12 4 }
.l7 { stroke: #57606a; stroke-dasharray: 6 2 2 2 2 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #adbac7 }
  .usable, .failure { stroke: #ff7b72 }
  .l0 { stroke: #539bf5 }
  .l1 { stroke: #e0823d }
  .l2 { stroke: #b083f0 }
  .l3 { stroke: #e275ad }
  .l4 { stroke: #8db53f }
  .l5 { stroke: #39b6cf }
  .l6 { stroke: #d4a72c }
  .l7 { stroke: #9ca7b3 }
}";

/// Live and mapped bytes over the steps, as the page shows them.
///
/// A size that is too small to read is enlarged.
///
/// ```
/// use poorwill_replay::page::svg;
/// use poorwill_replay::trace::Trace;
///
/// let svg = svg(&Trace { name: "a & b".into(), ..Trace::default() }, &[], 800, 440);
/// assert!(svg.starts_with("<svg ") && svg.contains("a &amp; b"));
/// ```
#[must_use]
pub fn svg(trace: &Trace, runs: &[Run], width: u32, height: u32) -> String {
    let live = trace.live_bytes();
    let scale = Scale::of(trace, runs, &live, width.max(WIDTH_MIN), height.max(HEIGHT_MIN));
    let lines = runs.iter().map(|run| run.mapped_bytes.as_slice());
    let all: Vec<&[u64]> = std::iter::once(live.as_slice()).chain(lines).collect();
    // More than a line has pixels is not seen.
    let most = usize::try_from(scale.right - scale.left).unwrap_or(usize::MAX);
    let curves = curves::curves(&all, &[], most);
    let mut svg = Svg::default();
    svg.push_frame(trace, runs, &scale);
    svg.push_phases(trace, &scale);
    svg.push_axes(&scale);
    if let Some(live) = curves.values.first() {
        let path = format!("{}V{}Z", scale.path(&curves.steps, live), scale.y(0));
        svg.line(&format!("<path class=\"live\" d=\"{path}\"/>"));
    }
    if scale.has_usable {
        let (left, right, y) = (scale.left, scale.right, scale.y(scale.usable));
        svg.line(&format!("<path class=\"usable\" d=\"M{left} {y}H{right}\"/>"));
    }
    let looks = looks(runs);
    // The first ones lie on top.
    for ((run, look), values) in runs.iter().zip(&looks).zip(curves.values.iter().skip(1)).rev() {
        svg.line(&format!("<path class=\"l{look}\" d=\"{}\"/>", scale.path(&curves.steps, values)));
        if let Some(failure) = run.failure {
            let (x, y) = (scale.x(failure.step), scale.y(failure.at.mapped_bytes));
            svg.line(&format!("<path class=\"failure\" d=\"M{x} {y}m-5 -5l10 10m0 -10l-10 10\"/>"));
        }
    }
    svg.push_legend(runs, &looks, &live, &scale);
    svg.line("</svg>");
    svg.0
}

/// From figures to places.
struct Scale {
    width: u64,
    height: u64,
    left: u64,
    right: u64,
    bottom: u64,
    steps: u64,
    /// At the top.
    bytes: u64,
    unit: (u64, &'static str),
    tick: u64,
    usable: u64,
    has_usable: bool,
    columns: u64,
}

impl Scale {
    fn of(trace: &Trace, runs: &[Run], live: &[u64], width: u32, height: u32) -> Self {
        let (width, height) = (u64::from(width), u64::from(height));
        let peak =
            runs.iter().map(|run| run.peak.mapped_bytes).chain(live.iter().copied()).max().unwrap_or(0);
        let usable = runs.iter().map(|run| run.card.usable_bytes()).max().unwrap_or(0);
        let (highest, has_usable) = ceiling(peak, usable);
        let unit = UNITS.into_iter().find(|(unit, _)| highest >= 2 * unit).unwrap_or(UNITS[3]);
        let tick = tick(highest.div_ceil(unit.0));
        let top = (highest / unit.0 + 1).next_multiple_of(tick);
        let longest = runs.iter().map(|run| says(run).chars().count()).max().unwrap_or(0);
        let longest = u64::try_from(longest).unwrap_or(u64::MAX).saturating_mul(LEGEND_LETTER) + SWATCH;
        let columns = if 2 * longest <= width - LEFT - RIGHT { 2 } else { 1 };
        let items = u64::try_from(runs.len()).unwrap_or(0) + 2;
        let below = BELOW + items.div_ceil(columns) * LEGEND_ROW;
        let bottom = height.saturating_sub(below).max(TOP + 100);
        Self {
            width,
            height: bottom + below,
            left: LEFT,
            right: width - RIGHT,
            bottom,
            steps: u64::try_from(trace.steps.len()).unwrap_or(u64::MAX).max(1),
            bytes: top.saturating_mul(unit.0),
            unit,
            tick,
            usable,
            has_usable,
            columns,
        }
    }

    fn x(&self, step: usize) -> Tenths {
        let (step, width) = (u128::try_from(step).unwrap_or(0), u128::from(self.right - self.left) * 10);
        let along = u64::try_from(step * width / u128::from(self.steps)).unwrap_or(0);
        Tenths(self.left * 10 + along.min((self.right - self.left) * 10))
    }

    fn y(&self, bytes: u64) -> Tenths {
        let height = u128::from(bytes) * u128::from((self.bottom - TOP) * 10) / u128::from(self.bytes.max(1));
        Tenths((self.bottom * 10).saturating_sub(u64::try_from(height).unwrap_or(u64::MAX)))
    }

    /// Stairs: a value holds from its step to the next. Corners only where it changes.
    fn path(&self, steps: &[usize], values: &[u64]) -> String {
        let mut path = format!("M{} {}", Tenths(self.left * 10), self.y(0));
        let (mut at, mut end) = (self.y(0), 0);
        for (step, bytes) in steps.iter().zip(values) {
            let y = self.y(*bytes);
            if y != at {
                let _ = write!(path, "H{}V{y}", self.x(*step));
                at = y;
            }
            end = step + 1;
        }
        let _ = write!(path, "H{}", self.x(end));
        path
    }
}

#[derive(Default)]
struct Svg(String);

impl Svg {
    fn line(&mut self, text: &str) {
        self.0.push_str(text);
        self.0.push('\n');
    }

    fn push_frame(&mut self, trace: &Trace, runs: &[Run], scale: &Scale) {
        let (title, width, height) = (escaped(&trace.name), scale.width, scale.height);
        self.line(&format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
             height=\"{height}\" role=\"img\">"
        ));
        self.line(&format!("<title>{title}</title>"));
        let names: Vec<String> = runs.iter().map(|run| escaped(&says(run))).collect();
        self.line(&format!("<desc>{}</desc>", names.join("; ")));
        self.line(&format!("<style>\n{STYLE}\n</style>"));
        self.line(&format!("<text class=\"title\" x=\"{}\" y=\"24\">{title}</text>", scale.left));
    }

    /// A band for every second one. Names only where they fit.
    fn push_phases(&mut self, trace: &Trace, scale: &Scale) {
        for (number, phase) in trace.phases.iter().enumerate() {
            let next = trace.phases.get(number + 1).map_or(trace.steps.len(), |next| next.from);
            let (from, to) = (scale.x(phase.from), scale.x(next));
            let width = Tenths(to.0.saturating_sub(from.0));
            if width.0 < 10 {
                continue;
            }
            if number % 2 == 0 {
                let height = scale.bottom - TOP + 20;
                self.line(&format!(
                    "<rect class=\"band\" x=\"{from}\" y=\"{}\" width=\"{width}\" height=\"{height}\"/>",
                    TOP - 20
                ));
            }
            let letters = u64::try_from(phase.name.chars().count()).unwrap_or(u64::MAX);
            if letters.saturating_mul(LETTER) + 12 <= width.0 / 10 {
                let (x, name) = (Tenths(from.0 + 60), escaped(&phase.name));
                self.line(&format!("<text x=\"{x}\" y=\"{}\">{name}</text>", TOP - 6));
            }
        }
    }

    fn push_axes(&mut self, scale: &Scale) {
        let (left, right) = (scale.left, scale.right);
        for ticks in (0..=scale.bytes / scale.unit.0).step_by(at(scale.tick)) {
            let y = scale.y(ticks * scale.unit.0);
            let class = if ticks == 0 { "axis" } else { "grid" };
            self.line(&format!("<path class=\"{class}\" d=\"M{left} {y}H{right}\"/>"));
            let label = if ticks == 0 { "0".to_owned() } else { format!("{ticks} {}", scale.unit.1) };
            let (x, baseline) = (left - 6, Tenths(y.0 + 45));
            self.line(&format!("<text class=\"end\" x=\"{x}\" y=\"{baseline}\">{label}</text>"));
        }
        let step_tick = tick(scale.steps);
        for step in (0..=scale.steps).step_by(at(step_tick)) {
            let (x, bottom) = (scale.x(at(step)), scale.bottom);
            self.line(&format!("<path class=\"axis\" d=\"M{x} {bottom}v5\"/>"));
            let y = bottom + 20;
            self.line(&format!("<text class=\"middle\" x=\"{x}\" y=\"{y}\">{}</text>", thousands(step)));
        }
        let (middle, y) = (u64::midpoint(left, right), scale.bottom + 38);
        self.line(&format!("<text class=\"middle\" x=\"{middle}\" y=\"{y}\">allocations and frees</text>"));
    }

    fn push_legend(&mut self, runs: &[Run], looks: &[usize], live: &[u64], scale: &Scale) {
        let peak = live.iter().copied().max().unwrap_or(0);
        let usable = if scale.has_usable { "usable" } else { "" };
        let mut items: Vec<(String, String)> =
            runs.iter().zip(looks).map(|(run, look)| (format!("l{look}"), says(run))).collect();
        items.push(("live".to_owned(), format!("live: peak {}", figure(peak))));
        items.push((usable.to_owned(), format!("usable: {}", figure(scale.usable))));
        let rows = u64::try_from(items.len()).unwrap_or(1).div_ceil(scale.columns);
        for (number, (class, text)) in (0..).zip(items) {
            let x = scale.left + number / rows * ((scale.right - scale.left) / scale.columns);
            let y = scale.bottom + BELOW + 12 + LEGEND_ROW * (number % rows);
            let swatch = match &*class {
                "live" => {
                    format!("<rect class=\"live\" x=\"{x}\" y=\"{}\" width=\"26\" height=\"12\"/>", y - 11)
                }
                "" => String::new(),
                class => format!("<path class=\"{class}\" d=\"M{x} {}h26\"/>", y - 5),
            };
            self.line(&format!("{swatch}<text x=\"{}\" y=\"{y}\">{}</text>", x + SWATCH, escaped(&text)));
        }
    }
}

/// Of a run, in a few words.
fn says(run: &Run) -> String {
    match run.failure {
        Some(failure) => format!(
            "{}: fails at step {}",
            run.setup,
            thousands(u64::try_from(failure.step).unwrap_or(u64::MAX))
        ),
        None => format!("{}: peak {}", run.setup, figure(run.peak.mapped_bytes)),
    }
}

const UNITS: [(u64, &str); 4] = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B")];

/// `96.21 GiB`.
fn figure(bytes: u64) -> String {
    let (unit, name) = UNITS.into_iter().find(|(unit, _)| bytes >= *unit).unwrap_or(UNITS[0]);
    let hundredths = (u128::from(bytes) * 100 + u128::from(unit) / 2) / u128::from(unit);
    format!("{}.{:02} {name}", hundredths / 100, hundredths % 100)
}

/// `12 345`, with narrow blanks that do not break.
fn thousands(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
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

/// A round distance that cuts `extent` into eight pieces at most.
fn tick(extent: u64) -> u64 {
    let round = (0..18).flat_map(|power| [1, 2, 5].map(|digit| digit * 10_u64.pow(power)));
    round.into_iter().find(|tick| extent.div_ceil(*tick) <= 8).unwrap_or(extent.max(1))
}

fn at(count: u64) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}

#[test]
fn figures_have_units_that_fit() {
    assert_eq!([0, 5, 3 << 19, 24_251 << 20].map(figure), ["0.00 GiB", "5.00 B", "1.50 MiB", "23.68 GiB"]);
    assert_eq!(
        [0, 999, 1000, 1_234_567].map(thousands),
        ["0", "999", "1\u{202f}000", "1\u{202f}234\u{202f}567"]
    );
}
