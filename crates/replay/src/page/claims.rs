//! Claims of a budget, one on top of the other.

use crate::claim::Claim;

/// Where a claim lies between two steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub(super) struct Shelf {
    pub(super) from: usize,
    pub(super) to: usize,
    /// What lies below it.
    pub(super) base: u64,
}

/// For each claim, where it lies: on those before it.
pub(super) fn shelves(claims: &[Claim], steps: usize) -> Vec<Vec<Shelf>> {
    let ends = claims.iter().flat_map(|claim| [claim.from_step, claim.to_step]);
    let mut edges: Vec<usize> = ends.map(|step| step.min(steps)).collect();
    edges.sort_unstable();
    edges.dedup();
    let covers = |claim: &Claim, from: usize| from < steps && claim.is_made_at(from);
    let of = |number: usize| {
        let mut found: Vec<Shelf> = Vec::new();
        for pair in edges.windows(2) {
            let (from, to) = (pair[0], pair[1]);
            if !covers(&claims[number], from) {
                continue;
            }
            let below = claims[..number].iter().filter(|claim| covers(claim, from));
            let base = below.fold(0_u64, |sum, claim| sum.saturating_add(claim.bytes));
            match found.last_mut() {
                Some(last) if last.base == base => last.to = to,
                _ => found.push(Shelf { from, to, base }),
            }
        }
        found
    };
    (0..claims.len()).map(of).collect()
}

/// The highest edge of all.
pub(super) fn top_bytes(claims: &[Claim], shelves: &[Vec<Shelf>]) -> u64 {
    let tops = claims
        .iter()
        .zip(shelves)
        .flat_map(|(claim, shelves)| shelves.iter().map(|shelf| shelf.base.saturating_add(claim.bytes)));
    tops.max().unwrap_or(0)
}

#[test]
fn a_claim_lies_on_those_that_are_made_at_the_same_time() {
    let claim = |bytes, from_step, to_step| Claim { name: String::new(), bytes, from_step, to_step };
    let claims = [claim(10, 0, 100), claim(5, 50, 80), claim(2, 40, 200), claim(1, 60, 60)];
    let shelf = |from, to, base| Shelf { from, to, base };
    let found = shelves(&claims, 120);
    assert_eq!(
        found,
        [
            vec![shelf(0, 100, 0)],
            vec![shelf(50, 80, 10)],
            vec![shelf(40, 50, 10), shelf(50, 80, 15), shelf(80, 100, 10), shelf(100, 120, 0)],
            vec![],
        ]
    );
    assert_eq!(top_bytes(&claims, &found), 17);
}
