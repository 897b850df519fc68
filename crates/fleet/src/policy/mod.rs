//! Which models are placed where in a fleet, as a function without effects.
//!
//! [`decide`] takes what a controller knows and the time, and returns what to write. It keeps nothing between two calls,
//! so any controller goes on where another one ended.
//!
//! A placement says `hot` (keep it awake), `warm` (have it ready to wake) or `none`. Requests go to placements only.
//! Nodes decide about everything else: a warm model wakes for a request if memory can be had.
//!
//! Promises, for all that is understood:
//!
//! - A model is placed only on nodes that have it configured, with one goal for each.
//! - Hot copies on a GPU need no more than its budget together.
//! - A pinned model is hot where anything can hold it. What is not pinned leaves for it. The oldest of its hot copies are
//!   held, as many as its pin asks for.
//! - A model in demand has as many hot copies as carry it, as far as memory is there or is worth more so. The first is
//!   had where the wakes that it saves pay for it.
//! - Each model is placed on `copies_min` nodes, in as many failure domains, as far as these have it configured.
//! - A placement leaves a node that drains when the model is ready elsewhere, or no other node can have it. One whose
//!   engine was not started leaves at once. A drain ends empty once that is so for all.
//! - A node that is gone keeps nothing hot, and is forgotten after a while.
//! - A plan that was applied leaves nothing to do. Each hot copy stays for a least time.
//! - The order of the entries makes no difference.
//!
//! What is not understood, since it is newer or wrong, is left as it is.

mod demand;
mod goals;
mod hot;
mod leave;
mod plan;
mod rules;
mod table;
mod time;
mod view;
mod warm;

pub use self::plan::{Change, Lack, Plan, Shortage, Why, Write};
pub use self::rules::Rules;
pub use self::time::Time;
pub use self::view::{NodeView, View, ViewError};

use self::goals::Goals;
use self::table::Table;

/// Most rounds of one decision. Each takes what the one before has made possible; two are usual.
const ROUNDS_MAX: usize = 32;

/// What to write now.
///
/// ```
/// use poorwill_fleet::policy::{Rules, Time, View, Write, decide};
/// use poorwill_fleet::records::Goal;
///
/// let node = br#"{"format": 1, "instance": "5f0c", "gpus": [{"total_bytes": 100, "budget_bytes": 90}]}"#;
/// let model = br#"{"format": 1, "stage": "asleep", "gpus": [0], "need_bytes": [80], "rate": 0.5}"#;
/// let entries = [
///     ("/poorwill/prod/nodes/gpu-17", &node[..]),
///     ("/poorwill/prod/nodes/gpu-17/models/qwen", &model[..]),
/// ];
/// let (view, _) = View::read(&"prod".parse()?, entries);
/// let plan = decide(&view, &Rules::default(), Time(0));
/// assert_eq!(plan.changes[0].write, Write::Goal(Goal::Hot));
/// assert_eq!(plan.shortages[0].to_string(), "`qwen`: 1 of 2 nodes; no other can have it");
/// # Ok::<(), poorwill_fleet::name::NameError>(())
/// ```
#[must_use]
pub fn decide(view: &View, rules: &Rules, now: Time) -> Plan {
    let table = Table::of(view, rules, now);
    let mut goals = Goals::of(&table);
    let mut lacks = Vec::new();
    for _ in 0..ROUNDS_MAX {
        let before = goals.changes();
        lacks.clear();
        hot::fit(&mut goals);
        hot::pins(&mut goals, rules, &mut lacks);
        hot::shrink(&mut goals, rules);
        hot::grow(&mut goals, rules, &mut lacks);
        warm::copies(&mut goals, rules, &mut lacks);
        warm::spread(&mut goals, rules);
        leave::leave(&mut goals);
        warm::spare(&mut goals, rules);
        if goals.changes() == before {
            break;
        }
    }
    let held = hot::held(&goals);
    let change = |(at, goal, why): (usize, _, _)| {
        let pair = &table.pairs[at];
        let (model, node) = (table.models[pair.model].name.clone(), table.nodes[pair.node].name.clone());
        Change { model, node, write: Write::Goal(goal), is_held: held[at], why }
    };
    let mut changes: Vec<Change> = goals.into_changes(&held).map(change).collect();
    changes.extend(table.stray.iter().cloned());
    changes.sort_by(|one, other| (&one.model, &one.node).cmp(&(&other.model, &other.node)));
    lacks.sort_by_key(|(model, _)| *model);
    let shortage = |(model, lack): (usize, _)| Shortage { model: table.models[model].name.clone(), lack };
    Plan { changes, shortages: lacks.into_iter().map(shortage).collect() }
}
