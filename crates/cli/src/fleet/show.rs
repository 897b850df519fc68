//! Reports of `fleet`.

use comfy_table::CellAlignment;
use poorwill::ByteSize;
use poorwill_router::status::FleetStatus;

use poorwill_local::text::table;

pub(crate) fn status_text(status: &FleetStatus) -> String {
    let mut nodes = table(["node", "front", "domain", "GPUs", "budget", "models", "version", ""]);
    for node in &status.nodes {
        nodes.add_row([
            node.node.clone(),
            node.front_url.clone(),
            node.domain.clone(),
            node.gpus.to_string(),
            ByteSize(node.budget_bytes).to_string(),
            node.models.to_string(),
            node.version.clone(),
            if node.is_draining { "drains".to_owned() } else { String::new() },
        ]);
    }
    let mut models = table(["model", "node", "is", "wanted", "running", "queued", "since"]);
    for copy in &status.models {
        let stage = copy.stage.map_or_else(|| "gone".to_owned(), |stage| stage.to_string());
        let name = if copy.is_pinned { format!("{} (pinned)", copy.model) } else { copy.model.clone() };
        models.add_row([
            name,
            copy.node.clone(),
            stage,
            copy.goal.to_string(),
            copy.running.to_string(),
            copy.queued.to_string(),
            copy.why.clone().unwrap_or_default(),
        ]);
    }
    for column in models.column_iter_mut().skip(4).take(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let leader = match &status.leader {
        Some(leader) => format!("controller: {leader}\n"),
        None => "no controller is elected: nothing is placed anew\n".to_owned(),
    };
    let problems: String = status.problems.iter().map(|problem| format!("{problem}\n")).collect();
    format!("{nodes}\n{models}\n{leader}{problems}")
}
