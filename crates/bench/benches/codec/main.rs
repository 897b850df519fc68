//! Codes of granules on one core: measuring, encoding and decoding, and making the contents, of each kind.
//!
//! The quickest of all rounds counts, since whatever else the machine does only slows one down.
//!
//! `--formats` counts instead what the scheme would save of other formats of weights. `--file` encodes the whole granules
//! of a file, and decodes them again.
//!
//! `cargo bench -p poorwill-bench --bench codec -- [--rounds N] [--json] [--formats] [--file PATH]`

mod formats;

use std::fs;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use poorwill::{ByteSize, codec};
use poorwill_bench::Contents;

use self::formats::{FORMATS, Sizes};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const GRANULE_BYTES: usize = 2 << 20;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

struct Options {
    rounds: usize,
    json: bool,
    formats: bool,
    file: Option<PathBuf>,
}

fn options() -> Outcome<Options> {
    let mut options = Options { rounds: 200, json: false, formats: false, file: None };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--rounds" => {
                let rounds = args.next().ok_or("--rounds needs a value")?;
                options.rounds = rounds.parse::<usize>()?.max(1);
            }
            "--json" => options.json = true,
            "--formats" => options.formats = true,
            "--file" => options.file = Some(args.next().ok_or("--file needs a path")?.into()),
            "--bench" => {} // What `cargo bench` adds.
            _ => {
                let known = "--rounds N, --json, --formats, --file PATH";
                return Err(format!("unknown argument {arg}; known are {known}").into());
            }
        }
    }
    Ok(options)
}

/// Bytes of the code over those of the granule, and GiB of raw bytes each second.
struct Figures {
    ratio: f64,
    make: f64,
    measure: f64,
    encode: f64,
    decode: f64,
}

fn run() -> Outcome<()> {
    let Options { rounds, json, formats, file } = options()?;
    if let Some(path) = file {
        return show_file(&path);
    }
    if formats {
        show_formats(json);
        return Ok(());
    }
    if !json {
        println!("Granules of {}, quickest of {rounds} rounds, GiB/s", ByteSize(GRANULE_BYTES as u64));
        println!("         {:>7} {:>8} {:>7} {:>7} {:>7}", "size", "measure", "encode", "decode", "make");
    }
    for contents in Contents::ALL {
        let Figures { ratio, make, measure, encode, decode } = figures(contents, rounds)?;
        if json {
            println!(
                "{{\"contents\":\"{contents}\",\"ratio\":{ratio:.4},\"measure_gib_per_s\":{measure:.3},\"encode_gib_per_s\":{encode:.3},\"decode_gib_per_s\":{decode:.3},\"make_gib_per_s\":{make:.3}}}"
            );
        } else {
            println!("{contents:8} {ratio:7.4} {measure:8.2} {encode:7.2} {decode:7.2} {make:7.2}");
        }
    }
    Ok(())
}

fn show_file(path: &Path) -> Outcome<()> {
    let bytes = fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let (mut code, mut decoded) = (vec![0; codec::code_bytes_max(GRANULE_BYTES)], vec![0xFF; GRANULE_BYTES]);
    let (mut raw_bytes, mut code_bytes) = (0, 0);
    for granule in bytes.chunks_exact(GRANULE_BYTES) {
        let stored = codec::encode(granule, &mut code).ok_or("the longest code does not fit")?;
        codec::decode(&code[..stored], &mut decoded);
        if decoded != granule {
            return Err("other bytes came back".into());
        }
        (raw_bytes, code_bytes) = (raw_bytes + GRANULE_BYTES, code_bytes + stored);
    }
    if raw_bytes == 0 {
        return Err(format!("{} is shorter than a granule of 2 MiB", path.display()).into());
    }
    println!("{raw_bytes} bytes in {code_bytes}, {:.4}", as_float(code_bytes) / as_float(raw_bytes));
    Ok(())
}

fn show_formats(json: bool) {
    if !json {
        println!("Normally distributed weights, parts of their bytes");
        println!(
            "{:26} {:>7} {:>7} {:>16} {:>13}",
            "", "as bf16", "code", "exponents' bound", "values' bound"
        );
    }
    for format in &FORMATS {
        let (name, Sizes { as_bf16, code, exponents_bound, values_bound }) =
            (format.name, formats::sizes(format));
        if json {
            println!(
                "{{\"format\":\"{name}\",\"as_bf16\":{as_bf16:.4},\"code\":{code:.4},\"exponents_bound\":{exponents_bound:.4},\"values_bound\":{values_bound:.4}}}"
            );
        } else {
            println!("{name:26} {as_bf16:7.4} {code:7.4} {exponents_bound:16.4} {values_bound:13.4}");
        }
    }
}

fn figures(contents: Contents, rounds: usize) -> Outcome<Figures> {
    let mut granule = vec![0; GRANULE_BYTES];
    let make = rate(rounds, || contents.write(1, black_box(&mut granule)));
    let mut code = vec![0; codec::code_bytes_max(GRANULE_BYTES)];
    let mut decoded = vec![0xFF; GRANULE_BYTES];
    let measure = rate(rounds, || black_box(codec::encoded_bytes(black_box(&granule))));
    let bytes = codec::encode(&granule, &mut code).ok_or("the longest code does not fit")?;
    let encode = rate(rounds, || codec::encode(black_box(&granule), &mut code));
    let stored = &code[..bytes];
    let decode = rate(rounds, || codec::decode(black_box(stored), &mut decoded));
    if decoded != granule {
        return Err(format!("other bytes than the {contents} came back").into());
    }
    Ok(Figures { ratio: as_float(bytes) / as_float(GRANULE_BYTES), make, measure, encode, decode })
}

/// GiB of granules each second.
fn rate<T>(rounds: usize, mut act: impl FnMut() -> T) -> f64 {
    let seconds = (0..rounds).map(|_| {
        let started = Instant::now();
        black_box(act());
        started.elapsed().as_secs_f64()
    });
    as_float(GRANULE_BYTES) / f64::from(1 << 30) / seconds.fold(f64::INFINITY, f64::min)
}

#[allow(clippy::cast_precision_loss)] // Sizes far below 2^53.
fn as_float(bytes: usize) -> f64 {
    bytes as f64
}
