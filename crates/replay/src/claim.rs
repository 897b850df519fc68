//! What a load takes beside its allocator, such as graphs or the buffers of a library.

/// A part of the usable memory that no allocator may map.
///
/// It is taken before its first step, as by `cudaMalloc` of a library or the driver. That fails where memory lacks: no
/// allocator gives back for it what it has cached, unless the program calls `torch.cuda.empty_cache()` before.
///
/// ```
/// use poorwill_replay::Claim;
///
/// let graphs = Claim { name: "graphs".into(), bytes: 1567 << 20, from_step: 900, to_step: usize::MAX };
/// assert!(graphs.bytes > 1 << 30);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// Its name.
    pub name: String,
    /// How much it is.
    pub bytes: u64,
    /// The first step that it is made for.
    pub from_step: usize,
    /// The first step that it is not made for any more.
    pub to_step: usize,
}

impl Claim {
    /// Whether it is made for a step.
    pub(crate) const fn is_made_at(&self, step: usize) -> bool {
        self.from_step <= step && step < self.to_step
    }
}

/// Steps where the sum of the claims changes, in their order, with the sum from there on.
pub(crate) fn sums(claims: &[Claim]) -> Vec<(usize, u64)> {
    let mut steps: Vec<usize> = claims.iter().flat_map(|claim| [claim.from_step, claim.to_step]).collect();
    steps.sort_unstable();
    steps.dedup();
    let sum = |step: usize| {
        let made = claims.iter().filter(|claim| claim.is_made_at(step));
        made.fold(0_u64, |sum, claim| sum.saturating_add(claim.bytes))
    };
    steps.into_iter().map(|step| (step, sum(step))).collect()
}

/// The first step at which the values after steps and the claims have most together, and how much that is. Claims are made
/// before their first step, which may be behind the last one.
pub(crate) fn peak_with(claims: &[Claim], values: &[u64]) -> (usize, u64) {
    let sums = sums(claims);
    let (mut next, mut claimed, mut peak) = (sums.iter().peekable(), 0, (0, 0));
    let mut before = 0_u64;
    for step in 0..=values.len() {
        let mut most = 0;
        while let Some((_, sum)) = next.next_if(|(from, _)| *from <= step) {
            claimed = *sum;
            most = before.saturating_add(claimed);
        }
        if let Some(value) = values.get(step) {
            most = most.max(value.saturating_add(claimed));
            before = *value;
        }
        if most > peak.1 {
            peak = (step, most);
        }
    }
    peak
}

#[test]
fn sums_are_of_what_is_made_at_a_step() {
    let claim = |bytes, from_step, to_step| Claim { name: String::new(), bytes, from_step, to_step };
    let claims = [claim(10, 2, usize::MAX), claim(5, 1, 3)];
    assert_eq!(sums(&claims), [(1, 5), (2, 15), (3, 10), (usize::MAX, 0)]);
    // A claim is made before its first step.
    assert_eq!(peak_with(&claims, &[100, 90, 80, 70]), (1, 105));
    assert_eq!(peak_with(&claims, &[10, 90, 88, 70]), (2, 105));
    assert_eq!(peak_with(&claims, &[10, 20, 88, 70]), (2, 103));
    assert_eq!(peak_with(&[claim(7, 4, usize::MAX)], &[1, 1, 1, 9]), (4, 16));
    assert_eq!(peak_with(&[], &[3]), (0, 3));
}
