mod traces;
use poorwill_replay::page::*;
#[test]
#[ignore]
fn write() {
    let out = std::env::var("OUT").unwrap();
    let trace = traces::moe();
    let runs = traces::runs(&trace, 26 * traces::GIB);
    let claim = |name: &str, gib: u64, from, to| Claim { name: name.into(), bytes: gib * traces::GIB / 100, from_step: from, to_step: to };
    let claims = vec![claim("weights", 2200, 700, 1200), claim("cache", 3400, 830, 1200), claim("graphs", 253, 854, 1200)];
    let options = PageOptions { answer: "It fits 60 GiB with Poorwill's pool, at a peak of 24.55 GiB; PyTorch with max_split_size_mb:20 needs 97 GiB and fails at step 401. Without the split limit it fits, too.".into(), claims };
    std::fs::write(format!("{out}/moe.html"), page(&trace, &runs, &options).unwrap()).unwrap();
    std::fs::write(format!("{out}/moe.svg"), svg(&trace, &runs, 800, 520)).unwrap();
    for run in &runs { println!("{} peak {} failure {:?}", run.setup, run.peak.mapped_bytes >> 20, run.failure); }
    let now = std::time::Instant::now();
    let n = std::env::var("N").map_or(1_000_000, |n| n.parse().unwrap());
    let trace = traces::long(n);
    println!("trace {:?}", now.elapsed());
    let now = std::time::Instant::now();
    let runs = traces::runs(&trace, 79 * traces::GIB);
    println!("replay {:?}", now.elapsed());
    let now = std::time::Instant::now();
    let html = page(&trace, &runs, &options).unwrap();
    println!("page {:?} {} bytes", now.elapsed(), html.len());
    std::fs::write(format!("{out}/long.html"), html).unwrap();
    std::fs::write(format!("{out}/long.svg"), svg(&trace, &runs, 800, 520)).unwrap();
}
