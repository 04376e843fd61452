//! Runs one operation with rskafka. Arguments: address, operation, topic, and for some operations a codec or a count.

use std::collections::BTreeMap;
use std::error::Error;

use chrono::DateTime;
use rskafka::client::partition::{Compression, UnknownTopicHandling};
use rskafka::client::ClientBuilder;
use rskafka::record::Record;

const RECORDS: usize = 50;

fn compression(codec: &str) -> Compression {
    match codec {
        "uncompressed" => Compression::NoCompression,
        "gzip" => Compression::Gzip,
        "lz4" => Compression::Lz4,
        "snappy" => Compression::Snappy,
        "zstd" => Compression::Zstd,
        _ => panic!("unknown codec {codec}"),
    }
}

/// Record `number` of the records that "write" sends.
fn record(number: usize) -> Record {
    Record {
        key: Some(format!("key {number}").into_bytes()),
        value: Some(number.to_string().into_bytes()),
        headers: BTreeMap::from([("header".to_owned(), b"value".to_vec())]),
        timestamp: DateTime::from_timestamp_millis(1_000_000 + number as i64).unwrap(),
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, operation, topic, more @ ..] = arguments.as_slice() else {
        panic!("arguments: address, operation, topic");
    };
    let client = ClientBuilder::new(vec![address.clone()]).build().await?;
    if operation == "create" {
        client.controller_client()?.create_topic(topic.as_str(), 2, 1, 5_000).await?;
        return Ok(());
    }
    if operation == "list" {
        for found in client.list_topics().await? {
            println!("{} {:?}", found.name, found.partitions);
        }
        return Ok(());
    }
    let partition = client.partition_client(topic.as_str(), 0, UnknownTopicHandling::Error).await?;
    if operation == "write" {
        let records = (0..RECORDS).map(record).collect();
        println!("{:?}", partition.produce(records, compression(&more[0])).await?);
        return Ok(());
    }
    assert_eq!(operation, "read");
    // A fetch may return fewer records than requested, so the loop reads until it has `count` of them.
    let count: i64 = more[0].parse()?;
    let mut offset = 0;
    while offset < count {
        let (records, _) = partition.fetch_records(offset, 1..1_000_000, 1_000).await?;
        for found in records {
            println!("{}", String::from_utf8(found.record.value.unwrap())?);
            offset = found.offset + 1;
        }
    }
    Ok(())
}
