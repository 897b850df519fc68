//! Forwards driver calls, for drivers that wrap another one.

/// Implements the listed calls of [`poorwill_core::Driver`]: `self.before(op)`, then the call of `self.inner`.
macro_rules! forward {
    ($($op:ident: $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)+) => {
        $(fn $name(&self, $($arg: $ty),*) -> Result<$ret> {
            self.before(Op::$op)?;
            self.inner.$name($($arg),*)
        })+
    };
}

/// The figures of the wrapped device, for wrappers that have none of their own.
macro_rules! forward_figures {
    () => {
        fn info(&self) -> &DeviceInfo {
            self.inner.info()
        }

        forward! {
            MemoryInfo: memory_info() -> MemoryInfo;
        }
    };
}

/// The calls that neither take nor release memory: wrappers forward them all.
macro_rules! forward_streams_and_events {
    () => {
        fn check_process(&self) -> Result<()> {
            self.inner.check_process()
        }

        fn check_stream(&self, stream: StreamId) -> Result<()> {
            self.inner.check_stream(stream)
        }

        forward! {
            Reserve: reserve(bytes: u64) -> DeviceRange;
            Unreserve: unreserve(range: DeviceRange) -> ();
            StreamCreate: stream_create() -> StreamId;
            StreamCreate: stream_create_background() -> StreamId;
            StreamCreate: stream_create_kernel_copies() -> StreamId;
            StreamCreate: stream_create_over_link(link: usize) -> StreamId;
            StreamDestroy: stream_destroy(stream: StreamId) -> ();
            StreamSynchronize: stream_synchronize(stream: StreamId) -> ();
            StreamWaitEvent: stream_wait_event(stream: StreamId, event: EventId) -> ();
            EventRecord: event_record(stream: StreamId) -> EventId;
            EventSynchronize: event_synchronize(event: EventId) -> ();
            EventDestroy: event_destroy(event: EventId) -> ();
            Synchronize: synchronize() -> ();
            HostTrim: host_trim() -> ();
            LaunchHost: launch_host(stream: StreamId, work: HostWork) -> Pending<()>;
        }
    };
}

/// The calls for codes, which otherwise would be made of copies by the wrapper.
macro_rules! forward_codes {
    () => {
        forward! {
            Encode: encoded_bytes(stream: StreamId, ranges: &[DeviceRange]) -> Pending<Vec<u64>>;
            Encode: encode(
                stream: StreamId,
                dst: HostBuffer,
                parts: &[CodePart]
            ) -> Pending<(HostBuffer, Vec<Option<Encoded>>)>;
            Decode: decode(
                stream: StreamId,
                src: Arc<HostBuffer>,
                parts: &[CodePart],
                scratch: Option<Scratch>
            ) -> Pending<Vec<Digest>>;
        }
    };
}

pub(crate) use {forward, forward_codes, forward_figures, forward_streams_and_events};
