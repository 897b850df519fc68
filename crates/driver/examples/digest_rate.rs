//! How fast a GPU computes digests of its memory, and saves memory with digests of what was stored.
//!
//! `digest_rate [--device N] [--gib SIZE] [--variants]` prints one object of JSON, and ends with 1 if any digest is wrong.
//! `--variants` measures the kernel with other numbers of threads and registers, and other loads, too. A variant that
//! the driver does not take is a string in place of numbers.
//! `POORWILL_FAKE_LIBCUDA` runs it over that library, where only the digests mean something.
#![allow(unsafe_code)]

#[cfg(target_os = "linux")]
fn main() -> std::process::ExitCode {
    linux::main()
}

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
mod linux {
    use std::error::Error;
    use std::process::ExitCode;
    use std::sync::Arc;
    use std::time::Instant;

    use poorwill_core::digest::{Digest, LEAF_BYTES};
    use poorwill_core::{CopyPart, DeviceRange, Driver, HostBuffer, Pending, StreamId};
    use poorwill_driver::cuda::{DIGEST_PTX, Function, Grid, KernelArg, Module};
    use poorwill_driver::{CudaConfig, CudaDevice};

    type Outcome<T> = Result<T, Box<dyn Error>>;

    const GIB: u64 = 1 << 30;

    /// Granules whose bytes differ; further ones repeat them.
    const PERIOD: u64 = 32;

    /// Times that each thing is done; the fastest counts.
    const ROUNDS: usize = 5;

    /// The same where it is one granule, which takes no time.
    const ROUNDS_OF_ONE: usize = 50;

    /// Bytes that are saved by one call, where several calls follow each other.
    const CHUNK_BYTES: u64 = 32 << 20;

    pub(crate) fn main() -> ExitCode {
        match run() {
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::FAILURE,
            Err(error) => {
                eprintln!("digest_rate: {error}");
                ExitCode::FAILURE
            }
        }
    }

    struct Options {
        device: u32,
        bytes: u64,
        variants: bool,
    }

    fn options() -> Outcome<Options> {
        let mut options = Options { device: 0, bytes: 8 * GIB, variants: false };
        let mut args = std::env::args().skip(1);
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or(format!("{arg} needs a number"));
            match arg.as_str() {
                "--device" => options.device = value()?.parse()?,
                "--gib" => options.bytes = value()?.parse::<u64>()?.max(1) * GIB,
                "--variants" => options.variants = true,
                _ => return Err(format!("unknown argument {arg}").into()),
            }
        }
        Ok(options)
    }

    /// Memory of the device with known digests.
    struct Filled {
        range: DeviceRange,
        expected: Vec<Digest>,
    }

    fn run() -> Outcome<bool> {
        let options = options()?;
        let library = std::env::var_os("POORWILL_FAKE_LIBCUDA").map(Into::into);
        let device =
            CudaDevice::open(&CudaConfig { ordinal: options.device, library, ..CudaConfig::default() })?;
        let filled = fill(&device, options.bytes)?;
        let mut fields = vec![
            format!("\"device\": \"{}\"", device.info().name),
            format!("\"kernel\": \"{}\"", device.digest_kernel().err().unwrap_or("in use").replace('"', "'")),
            format!("\"digested_bytes\": {}", filled.range.bytes),
        ];
        let mut right = true;

        let ranges = [filled.range];
        let digest = fastest(|| {
            let found = device.digest(StreamId::DEFAULT, &ranges)?.wait()?;
            right &= found == filled.expected;
            Ok(())
        })?;
        fields.push(rate("digest", filled.range.bytes, digest));
        let one = [DeviceRange::new(filled.range.addr, device.info().granule_bytes)];
        let one_s = fastest_of(ROUNDS_OF_ONE, || {
            device.digest(StreamId::DEFAULT, &one)?.wait()?;
            Ok(())
        })?;
        fields.push(format!("\"digest_of_one_granule_s\": {one_s:.6}"));

        save(&device, &filled, &mut fields, &mut right)?;
        kernels(&device, &filled, options.variants, &mut fields, &mut right)?;
        fields.push(format!("\"right\": {right}"));
        println!("{{\n  {}\n}}", fields.join(",\n  "));
        Ok(right)
    }

    /// What takes the least time of a few rounds, in seconds.
    fn fastest(work: impl FnMut() -> Outcome<()>) -> Outcome<f64> {
        fastest_of(ROUNDS, work)
    }

    fn fastest_of(rounds: usize, mut work: impl FnMut() -> Outcome<()>) -> Outcome<f64> {
        let mut best = f64::INFINITY;
        for _ in 0..rounds {
            let start = Instant::now();
            work()?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        Ok(best)
    }

    fn rate(name: &str, bytes: u64, seconds: f64) -> String {
        #[allow(clippy::cast_precision_loss)] // Three digits are printed.
        let gib = bytes as f64 / GIB as f64;
        format!("\"{name}_s\": {seconds:.6},\n  \"{name}_gib_per_s\": {:.1}", gib / seconds)
    }

    /// Memory with random bytes, no two granules of the first few alike, one bit changed here and there.
    fn fill(device: &CudaDevice, bytes: u64) -> Outcome<Filled> {
        let granule = device.info().granule_bytes;
        let bytes = bytes.min(device.memory_info()?.free_bytes / 2) / (PERIOD * granule) * PERIOD * granule;
        let range = device.reserve(bytes)?;
        let backing = device.create(bytes)?;
        device.map(range, backing)?;
        device.set_access(range)?;
        let granule_len = usize::try_from(granule)?;
        let mut source = device.host_alloc(PERIOD * granule)?;
        let mut state = 1_u64;
        for word in source.chunks_exact_mut(8) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            word.copy_from_slice(&(state ^ state >> 29).to_le_bytes());
        }
        source[granule_len..2 * granule_len].fill(0);
        source[2 * granule_len..3 * granule_len].fill(0xFF);
        let mut granules: Vec<Vec<u8>> = source.chunks(granule_len).map(<[u8]>::to_vec).collect();
        let of_period: Vec<Digest> = granules.iter().map(|granule| Digest::of(granule)).collect();
        let count = usize::try_from(bytes / granule)?;
        let mut expected: Vec<Digest> = of_period.iter().copied().cycle().take(count).collect();
        let source = Arc::new(source);
        for at in (0..bytes).step_by(usize::try_from(PERIOD * granule)?) {
            let part = DeviceRange::new(range.addr + at, PERIOD * granule);
            let parts = [CopyPart { device: part, host_offset: 0 }];
            device.copy_to_device(StreamId::DEFAULT, Arc::clone(&source), &parts)?.wait()?;
        }
        for nth in (3..count).step_by((count / 64).max(1)) {
            let (of_period, leaf) = (nth % granules.len(), nth % (granule_len / LEAF_BYTES));
            let bytes = &mut granules[of_period];
            let at = leaf * LEAF_BYTES;
            let before = bytes[at];
            bytes[at] ^= 0x40;
            expected[nth] = Digest::of(bytes);
            let device_addr = range.addr + nth as u64 * granule + at as u64;
            let parts = [CopyPart { device: DeviceRange::new(device_addr, 1), host_offset: 0 }];
            let byte = Arc::new(HostBuffer::from(vec![bytes[at]]));
            device.copy_to_device(StreamId::DEFAULT, byte, &parts)?.wait()?;
            bytes[at] = before;
        }
        Ok(Filled { range, expected })
    }

    /// Copies to the host alone, then saves: in one call, and in chunks over the device's copy streams.
    fn save(device: &CudaDevice, filled: &Filled, fields: &mut Vec<String>, right: &mut bool) -> Outcome<()> {
        let bytes = filled.range.bytes.min(2 * GIB);
        let granule = device.info().granule_bytes;
        let expected = &filled.expected[..usize::try_from(bytes / granule)?];
        let whole = [CopyPart { device: DeviceRange::new(filled.range.addr, bytes), host_offset: 0 }];
        let start = Instant::now();
        let mut buffer = Some(device.host_alloc(bytes)?);
        fields.push(rate("host_alloc", bytes, start.elapsed().as_secs_f64()));
        let mut take = || buffer.take().ok_or("the buffer has not come back");
        let mut held = take()?;
        let mut best = [f64::INFINITY; 2];
        for _ in 0..ROUNDS {
            let start = Instant::now();
            held = device.copy_to_host(StreamId::DEFAULT, held, &whole)?.wait()?;
            best[0] = best[0].min(start.elapsed().as_secs_f64());
            let start = Instant::now();
            let (stored, digests) = device.save(StreamId::DEFAULT, held, &whole)?.wait()?;
            best[1] = best[1].min(start.elapsed().as_secs_f64());
            *right &= digests == expected;
            held = stored;
        }
        drop(held);
        fields.push(rate("copy", bytes, best[0]));
        fields.push(rate("save_in_one_call", bytes, best[1]));

        let streams: Vec<StreamId> =
            (0..device.info().save_streams).map(|_| device.stream_create()).collect::<Result<_, _>>()?;
        let chunks: Vec<u64> = (0..bytes).step_by(usize::try_from(CHUNK_BYTES)?).collect();
        let part = |at: u64| {
            let range = DeviceRange::new(filled.range.addr + at, CHUNK_BYTES.min(bytes - at));
            [CopyPart { device: range, host_offset: 0 }]
        };
        let sizes: Vec<u64> = chunks.iter().map(|at| part(*at)[0].device.bytes).collect();
        let mut buffers: Vec<HostBuffer> =
            device.host_alloc_all(&sizes)?.into_iter().map(Pending::wait).collect::<Result<_, _>>()?;
        let mut best = [f64::INFINITY; 2];
        for _ in 0..ROUNDS {
            let start = Instant::now();
            let turns = chunks.iter().zip(streams.iter().cycle());
            let copies = turns
                .clone()
                .zip(buffers.drain(..))
                .map(|((at, stream), buffer)| device.copy_to_host(*stream, buffer, &part(*at)));
            let copies = copies.collect::<Result<Vec<_>, _>>()?;
            let mut back = copies.into_iter().map(Pending::wait).collect::<Result<Vec<_>, _>>()?;
            best[0] = best[0].min(start.elapsed().as_secs_f64());
            let start = Instant::now();
            let saves = turns
                .zip(back.drain(..))
                .map(|((at, stream), buffer)| device.save(*stream, buffer, &part(*at)));
            let saves = saves.collect::<Result<Vec<_>, _>>()?;
            let saved = saves.into_iter().map(Pending::wait).collect::<Result<Vec<_>, _>>()?;
            best[1] = best[1].min(start.elapsed().as_secs_f64());
            let (stored, digests): (Vec<_>, Vec<_>) = saved.into_iter().unzip();
            *right &= digests.concat() == expected;
            buffers = stored;
        }
        streams.into_iter().try_for_each(|stream| device.stream_destroy(stream))?;
        fields.push(rate("copy_in_chunks", bytes, best[0]));
        fields.push(rate("save_in_chunks", bytes, best[1]));
        Ok(())
    }

    /// An entry of the kernel's text, and what it says of its threads, and of blocks on a multiprocessor.
    struct Entry {
        name: &'static str,
        shape: (u32, u32),
    }

    const OF_DEVICE: Entry = Entry { name: "poorwill_digest", shape: (64, 8) };
    const OF_HOST: Entry = Entry { name: "poorwill_digest_host", shape: (512, 1) };

    /// How they read granules.
    const LOAD: &str = "ld.global.cv.v2";

    fn shape((threads, blocks): (u32, u32)) -> String {
        format!(".maxntid {threads}, 1, 1\n.minnctapersm {blocks}\n")
    }

    /// The text with other loads, and both entries in another shape.
    fn variant(load: &str, new: (u32, u32)) -> String {
        let entries = [OF_DEVICE, OF_HOST].into_iter();
        entries
            .fold(DIGEST_PTX.to_owned(), |ptx, entry| ptx.replace(&shape(entry.shape), &shape(new)))
            .replace(LOAD, load)
    }

    /// The kernel alone, over memory of the device and page-locked memory of the host, many granules and one; and
    /// variants of it: other loads, and other numbers of threads of a block and of blocks on a multiprocessor, which sets
    /// the registers.
    fn kernels(
        device: &CudaDevice,
        filled: &Filled,
        with_variants: bool,
        fields: &mut Vec<String>,
        right: &mut bool,
    ) -> Outcome<()> {
        if ![OF_DEVICE, OF_HOST].iter().all(|entry| DIGEST_PTX.matches(&shape(entry.shape)).count() == 1)
            || !DIGEST_PTX.contains(LOAD)
        {
            return Err("the kernel's text is not what this example expects".into());
        }
        let granule = device.info().granule_bytes;
        let bytes = filled.range.bytes.min(2 * GIB);
        let whole = [CopyPart { device: DeviceRange::new(filled.range.addr, bytes), host_offset: 0 }];
        let stored = device.host_alloc(bytes)?;
        let stored = device.copy_to_host(StreamId::DEFAULT, stored, &whole)?.wait()?;
        let host = device.pinned_at(&stored).ok_or("host memory is not page-locked")?;
        let work =
            |from: u64, bytes: u64| Work::new(device, (0..bytes / granule).map(|nth| from + nth * granule));
        let mut places = [
            (OF_DEVICE, "device", work(filled.range.addr, filled.range.bytes)?),
            (OF_DEVICE, "one granule on the device", work(filled.range.addr, granule)?),
            (OF_HOST, "host", work(host, bytes)?),
            (OF_HOST, "one granule of host memory", work(host, granule)?),
        ];

        let mut measure = |name: &str, ptx: &str, threads: Option<u32>| -> Outcome<()> {
            let module = match Module::load(device, ptx) {
                Ok(module) => module,
                Err(error) => {
                    fields.push(format!("\"{name}\": {:?}", error.to_string()));
                    return Ok(());
                }
            };
            for (entry, place, work) in &mut places {
                let function = module.function(entry.name)?;
                let name = format!("{name}, {place}");
                match work.run(device, &function, threads.unwrap_or(entry.shape.0)) {
                    Ok(seconds) => {
                        *right &= work.digests().eq(filled.expected[..work.count].iter().copied());
                        fields.push(match work.count {
                            1 => format!("\"{name}_s\": {seconds:.7}"),
                            count => rate(&name, count as u64 * granule, seconds),
                        });
                    }
                    Err(error) => fields.push(format!("\"{name}\": {:?}", error.to_string())),
                }
            }
            Ok(())
        };
        measure("kernel", DIGEST_PTX, None)?;
        for load in [LOAD, "ld.global.v2"].into_iter().filter(|_| with_variants) {
            for threads in [64, 128, 256, 512, 1024] {
                // With fewer threads on a multiprocessor each has all the registers it can have.
                let blocks = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16].into_iter();
                for blocks in blocks.filter(|blocks| (256..=2048).contains(&(blocks * threads))) {
                    let ptx = variant(load, (threads, blocks));
                    measure(&format!("{load} {threads} threads, {blocks} blocks"), &ptx, Some(threads))?;
                }
            }
        }
        Ok(())
    }

    /// Granules for the kernel: their addresses, and behind them room for their digests, in page-locked memory.
    struct Work {
        arrays: HostBuffer,
        count: usize,
        leaves: u32,
    }

    impl Work {
        fn new(device: &CudaDevice, granules: impl Iterator<Item = u64>) -> Outcome<Self> {
            let granules: Vec<u64> = granules.collect();
            // The digests begin at a multiple of 16.
            let count = granules.len();
            let mut arrays = device.host_alloc(8 * count.next_multiple_of(2) as u64 + 16 * count as u64)?;
            for (word, granule) in arrays.chunks_exact_mut(8).zip(granules) {
                word.copy_from_slice(&granule.to_le_bytes());
            }
            let leaves = u32::try_from(device.info().granule_bytes / LEAF_BYTES as u64)?;
            Ok(Self { arrays, count, leaves })
        }

        fn digests_at(&self) -> usize {
            8 * self.count.next_multiple_of(2)
        }

        /// Seconds that the kernel takes.
        fn run(&mut self, device: &CudaDevice, function: &Function, threads: u32) -> Outcome<f64> {
            let at = self.digests_at();
            self.arrays[at..].fill(0);
            let first = device.pinned_at(&self.arrays).ok_or("host memory is not page-locked")?;
            let args =
                [KernelArg::U64(first), KernelArg::U64(first + at as u64), KernelArg::U32(self.leaves)];
            let (blocks, shared_bytes) = (u32::try_from(self.count)?, 16 * self.leaves + 16);
            let grid = Grid { blocks, threads, shared_bytes };
            let rounds = if self.count == 1 { ROUNDS_OF_ONE } else { ROUNDS };
            fastest_of(rounds, || {
                // SAFETY: the kernel's parameters; all of the memory stays until it has been waited for.
                let launched = unsafe { device.launch(StreamId::DEFAULT, function, grid, &args) };
                Ok(launched?.wait()?)
            })
        }

        fn digests(&self) -> impl Iterator<Item = Digest> {
            self.arrays[self.digests_at()..].chunks_exact(16).take(self.count).map(|digest| {
                let mut bytes = [0; 16];
                bytes.copy_from_slice(digest);
                Digest(u128::from_le_bytes(bytes))
            })
        }
    }
}
