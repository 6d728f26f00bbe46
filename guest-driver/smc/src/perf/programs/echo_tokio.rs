// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Like `echo`, by tokio: a task for each connection, and a runtime of one thread on either side.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::runtime::Builder;

use super::{Schedule, measured, per_second};
use crate::perf::job::{EndReport, Job};
use crate::perf::usage::{Meter, SetupMeter};
use crate::transport::{AsyncStream, Stream, Transport};

/// Runs a task for each connection, until all have ended.
fn run<S: Stream, F: Future<Output = io::Result<()>> + Send + 'static>(
    streams: Vec<S>,
    task: impl Fn(Box<dyn AsyncStream>) -> F,
) -> io::Result<()> {
    Builder::new_current_thread().enable_io().build()?.block_on(async {
        let mut tasks = Vec::with_capacity(streams.len());
        for stream in streams {
            stream.send_at_once()?;
            tasks.push(tokio::spawn(task(stream.into_tokio()?)));
        }
        for task in tasks {
            task.await.map_err(io::Error::other)??;
        }
        Ok(())
    })
}

pub(super) fn serve<T: Transport>(
    transport: &T,
    listener: &T::Listener,
    job: &Job,
) -> io::Result<()> {
    let streams = (0..job.connections).map(|_| transport.accept(listener));
    let size = job.size;
    run(streams.collect::<io::Result<_>>()?, |mut stream| async move {
        let mut room = vec![0u8; size];
        loop {
            let n = stream.read(&mut room).await?;
            if n == 0 {
                return stream.shutdown().await;
            }
            stream.write_all(room.get(..n).unwrap_or_default()).await?;
        }
    })
}

/// The shared state of a client's tasks.
#[derive(Default)]
struct Progress {
    echoes: AtomicU64,
    is_over: AtomicBool,
}

pub(super) fn drive<T: Transport>(transport: &T, job: &Job) -> io::Result<EndReport> {
    let setup = SetupMeter::start(job.others);
    let streams: Vec<_> =
        (0..job.connections).map(|_| transport.connect(&job.address)).collect::<io::Result<_>>()?;
    let setup = setup.and_then(SetupMeter::stop);
    let progress = Arc::new(Progress::default());
    std::thread::scope(|scope| {
        let shared = &progress;
        let runtime =
            scope.spawn(move || run(streams, |stream| ask(stream, job.size, shared.clone())));
        let schedule = Schedule::from_now(job);
        std::thread::sleep(schedule.start.saturating_duration_since(Instant::now()));
        let (begun, before) = (Instant::now(), progress.echoes.load(Ordering::Relaxed));
        let meter = Meter::start(job.others);
        std::thread::sleep(schedule.end.saturating_duration_since(Instant::now()));
        let echoes = progress.echoes.load(Ordering::Relaxed) - before;
        let usage = meter.and_then(|meter| meter.stop(echoes));
        let time = begun.elapsed();
        progress.is_over.store(true, Ordering::Relaxed);
        runtime.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))?;
        Ok(EndReport { setup, ..measured(per_second(echoes, time)?, usage) })
    })
}

/// Sends messages, each after the return of the preceding one.
async fn ask(
    mut stream: Box<dyn AsyncStream>,
    size: usize,
    progress: Arc<Progress>,
) -> io::Result<()> {
    let (message, mut room) = (vec![0x5a; size], vec![0u8; size]);
    while !progress.is_over.load(Ordering::Relaxed) {
        stream.write_all(&message).await?;
        stream.read_exact(&mut room).await?;
        progress.echoes.fetch_add(1, Ordering::Relaxed);
    }
    // An orderly end, without resets for the server.
    stream.shutdown().await?;
    while stream.read(&mut room).await? > 0 {}
    Ok(())
}
